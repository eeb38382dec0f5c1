"""Scripts may seed the global generator; these fixtures keep that from one another and from the other tests."""

from collections.abc import Iterator

import pytest
from pytorch_lightning.utilities.seed import isolate_rng


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    with isolate_rng():
        yield
