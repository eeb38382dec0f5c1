"""``load`` and ``Saved.save``: a module as one safetensors file, with its tensors and its constructor's arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import save as serialized
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy

from diffusion_mp.checks import check_kind, checked, describe, needed_by

Place = str | os.PathLike[str]
S = TypeVar("S", bound="Saved")
FORMAT = 1
KEY = "diffusion_mp"
FILE = "model.safetensors"
# A file of a few bytes must not make a constructor run for hours or fill the memory. So
# an integer argument is at most this, or the bytes of the tensors where they are more,
LARGEST = 1_000_000
# and a model has at most so many modules and parameters, and a hundred more for each of
# its tensors.
PARTS = 5_000
# In JSON the key that marks a description of an object; no argument of a constructor
# begins with a dollar.
CLASS = "$class"
DTYPES = {
    str(each)[6:]: each
    for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
WAY_OUT = "Save model.state_dict(), and build the model in Python"


@dataclass(eq=False)
class Description:
    """A class and the arguments of its constructor, by name.

    An argument is plain data, a tensor, a description, or an error in place of anything else.
    """

    kind: type
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Described:
    """Base of classes whose objects are saved by class name and arguments; `load` knows the classes of the library."""

    classes: ClassVar[dict[str, type[Described]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        package, _, _ = cls.__module__.partition(".")
        if package == "diffusion_mp" and not cls.__name__.startswith("_"):
            Described.classes[cls.__name__] = cls

    def _describe(self) -> Description | TypeError:
        if is_dataclass(self):
            names = [each.name for each in fields(self) if each.init]
            values = {name: described(getattr(self, name)) for name in names}
            return Description(type(self), values)
        # The attributes of another object say nothing about the arguments that it was
        # built with.
        if vars(self):
            return TypeError(describe(self))
        return Description(type(self))


def described(value: Any) -> Any:
    """Return an argument as a `Description` holds it: ``None`` for a generator, whose draws are in the state."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    # A float64 of NumPy or a member of an enum is a subclass, which JSON reduces to the
    # plain value.
    if isinstance(value, (int, float, str)):
        return json.loads(json.dumps(value))
    if isinstance(value, Described):
        return value._describe()
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter):
            return nn.Parameter(value.detach())
        return value.detach()
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, dict):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, torch.Generator):
        return None
    return TypeError(describe(value))


class Saved(nn.Module, Described):
    """Base of modules that remember the arguments of their constructor, so that `load` can build them again."""

    _description: Description

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The annotations of other people's classes are their own.
        if "__init__" in vars(cls) and cls.__module__.startswith("diffusion_mp."):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def __new__(cls: type[S], *args: Any, **kwargs: Any) -> S:
        # In __new__, so that a subclass may call super().__init__ when and with what it
        # likes.
        self = super().__new__(cls)
        # By name, so that constructors may change their order; `*parts` have no names.
        _, *parameters = signature(cls.__init__).parameters.values()
        if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters):
            by_name: dict[str, Any] = {"*": args}
        else:
            names = [each.name for each in parameters]
            by_name = dict(zip(names, args, strict=False))
        # Past nn.Module, whose __setattr__ asks for its own constructor first.
        description = Description(cls, described(by_name | kwargs))
        self.__dict__["_description"] = description
        return self

    def _describe(self) -> Description:
        return self._description

    def extra_repr(self) -> str:
        """Return the numbers and words that the module was built with; the repr lists submodules below."""
        shown = [
            f"{name}={value!r}"
            for name, value in self._description.arguments.items()
            if type(value) in (bool, int, float, str, type(None))
        ]
        return ", ".join(shown)

    def save(self, path: Place) -> None:
        """Write the state dict and the constructor's arguments to a safetensors file, which `load` reads.

        At every moment the file is either the old file or the complete new file.

        Args:
            path: path of the file, in a folder that exists.

        Raises:
            ValueError: an argument is neither plain data nor an object of this library; parameters were added, removed
                or reshaped after construction; or parameters have no shape before the first call.
            FileNotFoundError: the folder does not exist.
        """
        check_kind(path, "path", (str, os.PathLike), "the path of a file")
        kind = type(self).__name__
        classes = dict(Described.classes)
        for name, parameter in self.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"{kind} has no values for {name} before its first call. Call it once, then save it."
                )
        about = _written(self._description, classes, {})
        # Copies, since safetensors refuses tensors that share memory.
        state = {
            name: value.detach().cpu().clone().contiguous()
            for name, value in self.state_dict().items()
        }
        flaw = _misfit(_built(about, classes, state), state)
        if flaw:
            raise ValueError(
                f"{kind} was changed after it was built: built again, it {flaw}. {WAY_OUT}."
            )
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(
                f"There is no folder {Path(path).parent} to save in."
            )
        if Path(path).is_dir():
            raise IsADirectoryError(f"path must name a file; {path} is a folder.")
        # Renamed when it is complete, so that no reader finds half a file.
        draft = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
        draft.write_bytes(
            serialized(state, {KEY: json.dumps({"format": FORMAT, "model": about})})
        )
        draft.replace(path)

    def save_pretrained(self, folder: Place, **options: Any) -> None:
        """Save to a folder in the format of the Hugging Face Hub, with a model card.

        Args:
            folder: path of the folder.
            options: further options of `ModelHubMixin.save_pretrained`.
        """
        _on_hub()(self).save_pretrained(folder, **options)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload to a repository of the Hugging Face Hub, and return the address of the upload.

        Args:
            name: name of the repository, ``"owner/name"``.
            options: further options of `ModelHubMixin.push_to_hub`.
        """
        with _reaching(name):
            return cast("str", _on_hub()(self).push_to_hub(name, **options))

    @classmethod
    def from_pretrained(
        cls: type[S], name: Place, *, classes: Sequence[type] = (), **options: Any
    ) -> S:
        """Load from a folder that `save_pretrained` wrote, or from a repository of the Hugging Face Hub.

        Args:
            name: path of the folder, or ``"owner/name"`` of the repository.
            classes: your own subclasses that the file may name. By default only classes of this library.
            options: further options of `ModelHubMixin.from_pretrained`.

        Raises:
            ValueError: the module is not an instance of this class.
        """
        with _reaching(name):
            model = _on_hub().from_pretrained(name, classes=classes, **options).model
        if not isinstance(model, cls):
            raise ValueError(
                f"{name} holds a {type(model).__name__}, and {cls.__name__} was asked for."
            )
        return model


def load(path: Place, *, classes: Sequence[type] = ()) -> Saved:
    """Return the module that ``module.save(path)`` wrote, on the CPU, in evaluation mode and in its own dtype.

    Nothing in the file is run. The file holds numbers, names of classes of this library, and arguments, which the
    constructors check. Attributes that were set after construction are not in it. Sizes are compared with the tensors
    before memory is taken.

    Args:
        path: path of the file.
        classes: your own subclasses that the file may name. By default only classes of this library.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, comes from a newer version, or does not describe a module of known classes.

    Examples:
        >>> from tempfile import mkdtemp
        >>> model, path = DIFFormer(4, 16, 3).eval(), mkdtemp() + "/model.safetensors"
        >>> model.save(path)
        >>> torch.equal(load(path)(x, edge_index), model(x, edge_index))
        True
    """
    check_kind(path, "path", (str, os.PathLike), "the path of a file")
    for each in classes:
        if not isinstance(each, type) or not issubclass(each, Described):
            raise TypeError(
                f"classes must be subclasses of this library's modules or penalties; got {describe(each)}."
            )
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise ValueError(
            f"{path} is no safetensors file, or is damaged: {error}."
        ) from error
    if text is None:
        raise ValueError(
            f"{path} was not written by save(): it has tensors, but does not say of which module."
        )
    allowed = Described.classes | {each.__name__: each for each in classes}
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(
                f"it has format {content['format']!r}, and this version reads {FORMAT}. Update diffusion-mp."
            )
        # First without memory: a damaged file may ask for more than there is.
        flaw = _misfit(_built(content["model"], allowed, tensors), tensors)
        if not flaw:
            model = _built(content["model"], allowed, tensors, device="cpu")
    except Exception as error:
        raise ValueError(
            f"{path} describes a module that cannot be built: {error or type(error).__name__}"
        ) from error
    if flaw:
        raise ValueError(
            f"{path} does not fit the module that it describes, which {flaw}."
        )
    model.load_state_dict(tensors)
    # `load_state_dict` keeps the dtype of the module; the file has the dtype of the saved
    # one.
    for name, value in model.state_dict(keep_vars=True).items():
        value.data = tensors[name].clone()
    return model.eval()


def _written(
    value: Any, classes: dict[str, type[Described]], numbers: dict[Any, int]
) -> Any:
    """Return a description as JSON; ``classes`` gains classes from elsewhere, and ``numbers`` the objects."""
    # `described` returns an error that names what it cannot describe.
    if isinstance(value, TypeError):
        raise ValueError(
            f"{value} cannot be saved as an argument, for a file holds no code. {WAY_OUT}."
        )
    if isinstance(value, list):
        return [_written(each, classes, numbers) for each in value]
    if isinstance(value, dict):
        return {name: _written(each, classes, numbers) for name, each in value.items()}
    if not isinstance(value, (Tensor, Description)):
        return value
    # An object that is shared, a penalty of two layers say, is written once, and so are
    # views of one tensor.
    key: Any = id(value)
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.shape, value.stride())
    if key in numbers:
        return {CLASS: "again", "number": numbers[key]}
    if isinstance(value, Tensor):
        kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        dtype = str(value.dtype).removeprefix("torch.")
        about = {CLASS: kind, "data": value.tolist(), "dtype": dtype}
    else:
        name = value.kind.__name__
        if classes.setdefault(name, value.kind) is not value.kind:
            raise ValueError(
                f"{value.kind} cannot be saved, for another class has its name. Rename it."
            )
        about = {CLASS: name, **_written({**value.arguments}, classes, numbers)}
    numbers[key] = len(numbers)
    return about


def _built(
    about: Any,
    classes: Mapping[str, type],
    tensors: Mapping[str, Tensor],
    device: str = "meta",
) -> Saved:
    """Build the module of a description, no larger than these tensors allow; on the meta device it takes no memory."""
    largest = max(LARGEST, sum(value.nbytes for value in tensors.values()))
    left = PARTS + 100 * len(tensors)
    objects: list[Any] = []

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("it has more parts than the tensors account for.")

    def build(value: Any) -> Any:
        if isinstance(value, int) and abs(value) > largest:
            raise ValueError(f"{value} is more than the tensors account for.")
        if isinstance(value, list):
            return [build(each) for each in value]
        if not isinstance(value, dict):
            return value
        built = {key: build(each) for key, each in value.items()}
        name = built.pop(CLASS, None)
        if name is None:
            return built
        if name == "again":
            return objects[built["number"]]
        if name in ("tensor", "parameter"):
            data = torch.tensor(
                built["data"], dtype=DTYPES[built["dtype"]], device=device
            )
            objects.append(nn.Parameter(data) if name == "parameter" else data)
        elif name in classes:
            objects.append(classes[name](*built.pop("*", ()), **built))
        else:
            raise ValueError(
                f"there is no class {name!r}. If it is your own, pass load(path, classes=[{name}])."
            )
        return objects[-1]

    # Constructors draw initial values, which the file replaces, and must not move the
    # random numbers of the caller. The hooks count while constructors run, so one that
    # would build too much is stopped.
    with (
        torch.device(device),
        torch.random.fork_rng(devices=[]),
        modules.register_module_module_registration_hook(count),
        modules.register_module_parameter_registration_hook(count),
    ):
        model = build(about)
    if not isinstance(model, Saved):
        raise ValueError(f"it is no module, but {describe(model)}.")
    return model


def _misfit(model: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Return how the state of a module on the meta device differs from tensors in names, shapes or kinds of numbers."""
    # Parameters without a shape take the shape of the tensors; other differences are named
    # below.
    with suppress(RuntimeError, KeyError):
        model.load_state_dict(
            {name: value.to("meta") for name, value in tensors.items()}, strict=False
        )
    state = model.state_dict()
    for name in tensors:
        if name not in state:
            return f"has no {name!r}"
    for name, expected in state.items():
        if name not in tensors:
            return f"has {name!r}, which is missing"
        stored = tensors[name]
        # Floating numbers take the dtype of the file after they are loaded; integers
        # are never converted.
        both_floating = expected.is_floating_point() and stored.is_floating_point()
        alike = expected.dtype == stored.dtype or both_floating
        if is_lazy(expected) or expected.shape != stored.shape or not alike:
            return f"has {name!r} of another shape or type than {describe(stored)}"
    return None


def _on_hub() -> Any:
    """A class of huggingface_hub around one module."""
    with needed_by("The Hugging Face Hub", "diffusion-mp[hub]"):
        from huggingface_hub import ModelHubMixin, hf_hub_download

    # Made on first use: its base class comes from an optional package.
    class OnHub(
        ModelHubMixin, library_name="diffusion_mp", tags=["graph-neural-networks"]
    ):
        def __init__(self, model: Saved) -> None:
            self.model = model
            self._hub_mixin_config = _written(
                model._description, dict(Described.classes), {}
            )

        def _save_pretrained(self, save_directory: Path) -> None:
            self.model.save(save_directory / FILE)

        @classmethod
        def _from_pretrained(  # type: ignore[override]
            cls, *, model_id: str, classes: Any, **options: Any
        ) -> Any:
            path = Path(model_id, FILE)
            if not path.is_file():
                path = hf_hub_download(model_id, FILE, **options)
            return cls(load(path, classes=classes))

    return OnHub


@contextmanager
def _reaching(name: Place) -> Iterator[None]:
    """Turn what huggingface_hub raises without a connection, or without the repository, into one sentence."""
    try:
        yield
    except Exception as error:
        # Which of these raises depends on the version of huggingface_hub.
        package = type(error).__module__.partition(".")[0]
        if package not in ("huggingface_hub", "httpx", "httpx2", "requests"):
            raise
        raise ConnectionError(
            f"{name} could not be reached on the Hugging Face Hub: {error}"
        ) from error
