# %% [markdown]
# # Look at attention
# Two clusters of points. A coupling is an operator; `to_dense` writes it down as a matrix that can be looked at.

# %%
import torch

from diffusion_mp import GaussianDiffusivity, SimpleDiffusivity, UniformDiffusivity

generator = torch.Generator().manual_seed(0)
centre = torch.tensor([[2.0, 0.0]] * 10 + [[-2.0, 0.0]] * 10)
x = centre + 0.5 * torch.randn(20, 2, generator=generator)
kinds = {
    "uniform": UniformDiffusivity(),
    "simple": SimpleDiffusivity(),
    "Gaussian": GaussianDiffusivity(bandwidth=1.0, normalize=None, measure="distance"),
}

# %% [markdown]
# How much of its attention does a node of the first cluster give to its own cluster? Without any information it would
# be a half.

# %%
within = {}
for name, diffusivity in kinds.items():
    S = diffusivity(x).to_dense()[0]  # [nodes, nodes]; every row sums to one
    within[name] = S[:10, :10].sum(1).mean().item()
    print(f"{name}: {within[name]:.0%} within the cluster")

# %% [markdown]
# A picture, where matplotlib is installed.

# %%
try:
    import matplotlib.pyplot as plt
except ModuleNotFoundError:
    print("pip install matplotlib draws the three matrices")
else:
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    for ax, (name, diffusivity) in zip(axes, kinds.items(), strict=True):
        image = ax.imshow(diffusivity(x).to_dense()[0].numpy(), vmin=0)
        ax.set(title=f"{name}: {within[name]:.0%} within", xlabel="sends", ylabel="receives")
        figure.colorbar(image, ax=ax)
    plt.show()
