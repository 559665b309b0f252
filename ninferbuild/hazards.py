"""What a fingerprint cannot see through: the tables of uses that make an action uncacheable.

The standard library is allowed module by module: what is not known to be free of hidden inputs is refused. Installed
packages are allowed, except for known readers below Python, clients of the network, and global random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninferbuild.bytecode import Call


@dataclass(frozen=True, slots=True)
class Hazard:
    """Why a use cannot be fingerprinted, and what to do instead."""

    why: str
    fix: str


def _words(text: str) -> list[str]:
    return text.split()


ENVIRONMENT = Hazard(
    "it reads the environment of the process", "read it while configuring and pass the value in parameters="
)
CLOCK = Hazard("it reads the clock", "remove it, or pass a fixed value in parameters=")
RANDOM = Hazard(
    "it draws random numbers that are not seeded here",
    "use a generator of its own with a fixed seed, such as numpy.random.default_rng(0) or "
    "torch.Generator().manual_seed(0) passed as generator=",
)
FILE_SYSTEM = Hazard(
    "it looks at the file system other than by opening a file",
    "open the file itself, by a path made with Path(__file__).with_name(…), or pass what it found in parameters=",
)
NETWORK = Hazard("it uses the network", "fetch the data beforehand and open it as a file")
PROCESSES = Hazard("it runs other processes or threads", "compute in the function itself")
BELOW_PYTHON = Hazard(
    "it can read files without Python noticing", "read with numpy.load, numpy.fromfile, numpy.memmap or open()"
)
INTROSPECTION = Hazard("it looks at code, frames or modules", "pass what it needs as arguments or in parameters=")
UNKNOWN_MODULE = Hazard(
    "this module of the standard library is not known to be free of hidden inputs",
    "do this part while configuring and pass the result in parameters=",
)

SAFE_STANDARD_LIBRARY = frozenset(
    _words(
        """__future__ abc array ast base64 binascii bisect builtins bz2 cmath codecs collections
        configparser contextlib copy copyreg csv dataclasses datetime decimal difflib enum errno fnmatch
        fractions functools graphlib gzip hashlib heapq hmac html io itertools json keyword logging lzma
        math mmap numbers operator pathlib pickle pprint queue re reprlib string struct tarfile textwrap
        tomllib types typing unicodedata warnings xml zipfile zlib"""
    )
)
"""Modules whose results follow from their arguments, from files opened through Python, or go to a log only."""

_SAFE_OS = frozenset(
    _words(
        """altsep close curdir devnull dup error extsep fdopen fsdecode fsencode fspath linesep lseek name open
        pardir PathLike pread preadv read readv sep"""
    )
)
_SAFE_OS_PATH = frozenset(
    _words(
        """altsep basename commonpath commonprefix curdir dirname extsep isabs join normcase normpath pardir
        sep split splitdrive splitext splitroot"""
    )
)
_SAFE_SYS = frozenset(_words("""byteorder exc_info float_info int_info intern maxsize stderr stdout version_info"""))
_SEEDED = frozenset(_words("""Random RandomState SeedSequence MT19937 PCG64 PCG64DXSM Philox SFC64 default_rng"""))
_TORCH_RANDOM = frozenset(
    _words(
        """bernoulli initial_seed manual_seed multinomial normal poisson rand rand_like randint randint_like
        randn randn_like randperm seed"""
    )
)

_ALIASES = {"posix": "os", "nt": "os", "posixpath": "os.path", "ntpath": "os.path", "_sre": "re"}

_STANDARD_LIBRARY_HAZARDS: dict[str, Hazard] = {
    **dict.fromkeys(_words("time calendar"), CLOCK),
    **dict.fromkeys(_words("random secrets uuid"), RANDOM),
    **dict.fromkeys(_words("""getpass grp locale os platform pwd resource site sys sysconfig"""), ENVIRONMENT),
    **dict.fromkeys(_words("glob shutil tempfile"), FILE_SYSTEM),
    **dict.fromkeys(
        _words(
            """asyncore ftplib http imaplib poplib select selectors smtplib socket socketserver ssl urllib xmlrpc"""
        ),
        NETWORK,
    ),
    **dict.fromkeys(
        _words("""_thread asyncio concurrent multiprocessing pty signal subprocess threading"""), PROCESSES
    ),
    **dict.fromkeys(_words("ctypes dbm fcntl shelve sqlite3"), BELOW_PYTHON),
    **dict.fromkeys(
        _words("""dis gc importlib inspect linecache pkgutil runpy traceback tracemalloc weakref"""), INTROSPECTION
    ),
}

_PACKAGE_HAZARDS: dict[str, Hazard] = {
    **dict.fromkeys(
        _words(
            """cffi cv2 datasets deeplake duckdb fastsafetensors h5py lmdb netCDF4 onnx polars pyarrow rasterio
        safetensors sentencepiece tables tensorstore tokenizers transformers zarr"""
        ),
        BELOW_PYTHON,
    ),
    **dict.fromkeys(_words("""aiohttp boto3 httpx huggingface_hub requests urllib3 websocket wandb"""), NETWORK),
    **dict.fromkeys(_words("dask joblib psutil ray"), PROCESSES),
}

_TORCH_PARTS: dict[str, Hazard] = {
    **dict.fromkeys(_words("distributed multiprocessing futures"), PROCESSES),
    **dict.fromkeys(
        _words("""from_file hub ops.load_library classes.load_library jit.load utils.cpp_extension"""), BELOW_PYTHON
    ),
    **dict.fromkeys(_words("""nn.init nn.functional.dropout random cuda.manual_seed cuda.manual_seed_all"""), RANDOM),
    "utils.data": PROCESSES,
}

HAZARDOUS_BUILTINS: dict[str, Hazard] = {
    **dict.fromkeys(("__import__", "breakpoint", "compile", "eval", "exec", "globals"), INTROSPECTION),
    "hash": Hazard("hash() of text differs between runs", "use hashlib"),
    "id": Hazard("id() differs between runs", "compare objects with `is`"),
    "input": Hazard("it asks the user", "pass the answer in parameters="),
}

HAZARDOUS_ATTRIBUTES: dict[str, Hazard] = {
    **dict.fromkeys(_words("""environ environb getenv getenvb getcwd getcwdb cwd home expanduser"""), ENVIRONMENT),
    **dict.fromkeys(_words("""now today utcnow perf_counter perf_counter_ns monotonic time_ns"""), CLOCK),
    **dict.fromkeys(_words("SystemRandom urandom getrandom"), RANDOM),
    **dict.fromkeys(
        _words(
            """exists is_file is_dir is_symlink is_mount iterdir rglob stat lstat scandir listdir readlink realpath
        abspath resolve getmtime getctime getsize isfile isdir islink samefile"""
        ),
        FILE_SYSTEM,
    ),
    **dict.fromkeys(
        _words(
            """__builtins__ __closure__ __code__ __doc__ __globals__ __subclasses__ _getframe co_code f_back
        f_globals f_lineno f_locals"""
        ),
        INTROSPECTION,
    ),
}
"""Attributes that are a hazard on whatever object they are read from."""

PATH_ATTRIBUTES: dict[str, Hazard] = {"absolute": FILE_SYSTEM, "glob": FILE_SYSTEM, "walk": FILE_SYSTEM}
"""Attributes that are a hazard in a function that works with paths; elsewhere they mean something else."""

HAZARDOUS_DYNAMIC: dict[str, Hazard] = {
    **dict.fromkeys(_words("""os.listdir os.scandir os.walk os.fwalk glob.glob glob.glob/2 os.chdir"""), FILE_SYSTEM),
    **dict.fromkeys(
        _words(
            """os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.startfile subprocess.Popen pty.spawn
        _thread.start_new_thread _thread.start_joinable_thread"""
        ),
        PROCESSES,
    ),
    **dict.fromkeys(["sqlite3.connect"], BELOW_PYTHON),
    **dict.fromkeys(_words("""ctypes.dlopen ctypes.dlsym ctypes.call_function ctypes.cdata"""), BELOW_PYTHON),
    "builtins.input": HAZARDOUS_BUILTINS["input"],
}
"""Audit events that make a running function uncacheable; events of ``socket`` are one more family."""


def standard_library_hazard(module: str, chain: tuple[str, ...], call: Call | None = None) -> Hazard | None:
    """The hazard of reading ``chain`` from a module of the standard library (empty: the module itself), if any."""
    path = (*_ALIASES.get(module, module).split("."), *chain)
    top, rest = path[0], path[1:]
    if top.removeprefix("_") in SAFE_STANDARD_LIBRARY or top in SAFE_STANDARD_LIBRARY:
        return None
    if top == "_random":
        return RANDOM
    if top == "os" and rest:
        if rest[0] == "path" and len(rest) > 1:
            return None if rest[1] in _SAFE_OS_PATH else FILE_SYSTEM
        safe = rest[0] in _SAFE_OS or rest[0].startswith(("O_", "SEEK_"))
        return None if safe else HAZARDOUS_ATTRIBUTES.get(rest[0], ENVIRONMENT)
    if top == "sys" and rest and rest[0] in _SAFE_SYS:
        return None
    if top == "random" and rest[:1] == ("Random",):
        return None if _is_seeded(call) else RANDOM
    if top == "uuid" and rest and rest[0] in ("UUID", "uuid3", "uuid5"):
        return None
    return _STANDARD_LIBRARY_HAZARDS.get(top, UNKNOWN_MODULE)


def package_hazard(module: str, chain: tuple[str, ...], call: Call | None = None) -> Hazard | None:
    """The hazard of reading ``chain`` from a module of an installed package, if any."""
    path = (*module.split("."), *chain)
    top, rest = path[0], path[1:]
    if top == "numpy" and rest[:1] == ("random",):
        if rest[1:2] == ("Generator",):
            return None
        return None if rest[1:] and rest[1] in _SEEDED and _is_seeded(call) else RANDOM
    if top == "torch" and rest:
        if rest[0] in _TORCH_RANDOM:
            own = call is not None and "generator" in call.keywords
            return None if own else RANDOM
        dotted = ".".join(rest)
        for part, hazard in _TORCH_PARTS.items():
            if dotted == part or dotted.startswith((part + ".", part + "_")) or dotted.endswith("." + part):
                return hazard
    return _PACKAGE_HAZARDS.get(top)


def _is_seeded(call: Call | None) -> bool:
    return call is not None and call.arguments > 0 and not call.only_none
