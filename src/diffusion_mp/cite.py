"""``cite``: BibTeX entries of the papers behind a model, from `references.bib`."""

from __future__ import annotations

from importlib.resources import files

from torch import nn

from diffusion_mp.checks import checked

# An empty line between two entries is all that is needed of the syntax of BibTeX.
_ENTRIES = (
    files("diffusion_mp")
    .joinpath("references.bib")
    .read_text("utf-8")
    .strip()
    .split("\n\n")
)
REFERENCES = {
    entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in _ENTRIES
}


@checked
def cite(model: nn.Module) -> str:
    """Print and return the BibTeX entries of the papers behind a model and its parts, in the order of the parts.

    A module names its papers in a class attribute ``references``. The attribute holds keys of ``references.bib`` in
    this package, or BibTeX entries of your own.

    Args:
        model: any module; modules without ``references`` add nothing.

    Raises:
        ValueError: a key is not in ``references.bib``.

    Examples:
        >>> text = cite(SGConv(4, 3))  # doctest: +ELLIPSIS
        @...
    """
    # A set would forget the order.
    keys = dict.fromkeys(
        key for module in model.modules() for key in getattr(module, "references", ())
    )
    unknown = [key for key in keys if key not in REFERENCES and "@" not in key]
    if unknown:
        raise ValueError(
            f"references must be BibTeX entries or keys, such as {min(REFERENCES)!r}; got {unknown}."
        )
    text = "\n\n".join(REFERENCES.get(key, key) for key in keys)
    print(text)
    return text
