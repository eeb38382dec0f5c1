# %% [markdown]
# # Watch the energy
# A certificate says which step sizes lower the energy. Take one below its bound, and one far above.

# %%
import torch
from torch.nn.functional import normalize

from diffusion_mp import CertifiedDIFFormer, Energy, ExplicitEuler, SimplePenalty, certify

generator = torch.Generator().manual_seed(0)
start = normalize(torch.randn(30, 4, generator=generator, dtype=torch.float64), dim=1)
penalty = SimplePenalty()
certificate = certify(penalty, start, tau=0.5)
print(certificate)

# %% [markdown]
# Steps of DIFFormer-s: the coupling follows the state, and the energy falls at every one.

# %%
x, energy, energies = start, Energy(penalty, certificate.lam), []
for _ in range(10):
    S = penalty.coupling(x, normalize=True)
    following = ExplicitEuler(tau=0.5)(x, S)
    energies.append((energy(x, x).item(), energy(following, x).item()))  # before and after this step
    x = following
print("falls at every step:", all(after <= before for before, after in energies))

# %% [markdown]
# Beyond the largest step there is no promise, and the certificate says so.

# %%
refused = certify(penalty, start, tau=3.0)
print(bool(refused), "-", refused.reason)

# %% [markdown]
# A network of many layers: `energies` has the energy before the first layer and after each.

# %%
torch.manual_seed(0)
model = CertifiedDIFFormer(4, 8, 2, num_layers=6)
layers = model.energies(start.float(), torch.randint(0, 30, (2, 90)))
print("by layer:", [round(value, 2) for value in layers.tolist()])
