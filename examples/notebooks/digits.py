# %% [markdown]
# # Train on handwritten digits
# Three hundred images, five labels per class, a graph of nearest neighbours, and a certified network.

# %%
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from diffusion_mp import CertifiedDIFFormer
from diffusion_mp.data import knn_graph, random_split_per_class

pixels, digits = (torch.as_tensor(part[:300]) for part in load_digits(return_X_y=True))
x, y = pixels.float() / 16, digits.long()
edges = knn_graph(x, k=5)
split = random_split_per_class(y, 5, 50, None, torch.Generator().manual_seed(0))

# %% [markdown]
# The loss is that of the fifty images with a label; all others take part through the graph.

# %%
torch.manual_seed(0)
model = CertifiedDIFFormer(64, 32, 10, num_layers=8, encoder_layers=1, dropout=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
for epoch in range(1, 41):
    model.train()
    optimizer.zero_grad()
    loss = cross_entropy(model(x, edges)[split.train], y[split.train])
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        right = model.eval()(x, edges).argmax(1) == y
        print(f"epoch {epoch}: loss {loss.item():.2f}, validation {right[split.val].double().mean():.0%}")

# %%
share = (model.eval()(x, edges).argmax(1) == y)[split.test].double().mean().item()
print(f"test: {share:.0%}")
