"""From a user's own data to a comparison of models: `inputs.read` makes a `problem.Problem` of files and objects."""
