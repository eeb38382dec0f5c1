"""Images without a graph, five labels per class: a network and a graph teach each other, in scikit-learn's interface.

    python examples/classifier.py            # some seconds
    python examples/classifier.py --quick    # fewer rows and steps

Texts work the same way: take the rows of a TfidfVectorizer and metric="cosine". For tables, put a StandardScaler before
the classifier.
"""

import argparse

import numpy as np
from runs import needs

with needs("diffusion-mp[sklearn]"):
    from sklearn.datasets import load_digits
    from sklearn.semi_supervised import LabelSpreading

    from diffusion_mp.estimators import DiffusionClassifier


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="500 images and 30 steps")
    quick = parser.parse_args(argv).quick
    pixels, digits = load_digits(return_X_y=True)
    pixels, digits = (pixels[:500], digits[:500]) if quick else (pixels, digits)
    labels = np.full(
        len(digits), -1
    )  # -1: no label, as everywhere in sklearn.semi_supervised
    for digit in range(10):
        labels[np.flatnonzero(digits == digit)[:5]] = digit
    hidden = labels == -1
    ours = DiffusionClassifier(max_iter=30 if quick else 300, random_state=0)
    for model in (LabelSpreading(kernel="knn"), ours):
        found = model.fit(pixels, labels).transduction_
        print(
            f"{type(model).__name__:20} {100 * np.mean(found[hidden] == digits[hidden]):.1f} % of the others right"
        )
    noisy = pixels[:1] + np.random.default_rng(0).normal(size=64)
    print(f"A new image, a noisy {digits[0]}, is read as {ours.predict(noisy)[0]}.")


if __name__ == "__main__":
    main()
