"""rtflash as flash_attn: signatures, names by which libraries find it, differences that docs/migrate.md tells."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rtflash
from rtflash import compat

DENSE = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None"
    " deterministic=False return_attn_probs=False"
)
KVCACHE = (
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None"
    " cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0"
    " rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
)
OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
# FlashAttention 2.8.4's flash_attn_interface.py.
SIGNATURES = {
    "flash_attn_func": f"q k v {DENSE}",
    "flash_attn_kvpacked_func": f"q kv {DENSE}",
    "flash_attn_qkvpacked_func": f"qkv {DENSE}",
    "flash_attn_varlen_func": f"q k v {OFFSETS} {DENSE} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {OFFSETS} {DENSE}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {DENSE}",
    "flash_attn_with_kvcache": KVCACHE,
}


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package flash_attn that is not ours."""
    folder = tmp_path / "flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '2.0.0'\n", encoding="utf-8")
    (folder / "layers.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield folder
    compat.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attentions(name: str) -> None:
    parameters = inspect.signature(getattr(rtflash, name)).parameters.values()
    positional = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    written = " ".join(
        x.name if x.default is x.empty else f"{x.name}={x.default!r}".replace(" ", "")
        for x in positional
    )
    assert written == SIGNATURES[name]
    assert all(x.default is not x.empty for x in parameters if x.kind is x.KEYWORD_ONLY)


def test_installed_names(installed: None) -> None:
    import flash_attn
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    for name in SIGNATURES:
        assert getattr(flash_attn, name) is getattr(rtflash, name)
    assert flash_attn_varlen_func is rtflash.flash_attn_varlen_func
    assert callable(index_first_axis)
    assert callable(pad_input)
    assert callable(unpad_input)
    assert flash_attn.__version__ == compat.VERSION
    with pytest.raises(ImportError):
        import flash_attn.layers


def test_modules_of_flash_attn_are_told_where_they_are_looked_for() -> None:
    top, *others = compat.modules()
    for module in others:
        name = module.removeprefix(f"{top}.")
        with pytest.raises(AttributeError, match=rf"rtflash\.compat\.install\(\).*{module}"):
            getattr(rtflash, name)


def test_private_functions_that_libraries_build_on(installed: None) -> None:
    from flash_attn import flash_attn_interface as interface

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 2, 16)).astype(np.float16)
    slopes = np.array([0.1, 0.2], np.float32)
    given = (0.0, 0.3, True, 2, 0, 5.0, slopes, False)
    wanted = rtflash.flash_attn_func(
        q, k, v, 0.0, 0.3, True, (2, 0), 5.0, slopes, return_attn_probs=True
    )
    for name in ("_flash_attn_forward", "_wrapped_flash_attn_forward"):
        got = getattr(interface, name)(q, k, v, *given)
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])
        assert got[2:] == (None, None)
    packed, cu = [x.reshape(10, 2, 16) for x in (q, k, v)], np.array([0, 5, 10], np.int32)
    got = interface._flash_attn_varlen_forward(*packed, cu, cu, 5, 5, *given)
    np.testing.assert_array_equal(got[0].reshape(q.shape), wanted[0])
    np.testing.assert_array_equal(got[1].reshape(2, 2, 5).swapaxes(0, 1), wanted[1])
    with pytest.raises(NotImplementedError, match="leftpad_k"):
        interface._flash_attn_varlen_forward(*packed, cu, cu, 5, 5, *given, leftpad_k=cu)
    for name in ("_flash_attn_backward", "_wrapped_flash_attn_varlen_backward"):
        with pytest.raises(NotImplementedError, match=f"^{name} was called; .*no backward yet"):
            getattr(interface, name)(q, k, v, causal=True)


def test_what_libraries_ask_of_importlib(installed: None) -> None:
    assert importlib.util.find_spec("flash_attn") is not None
    assert importlib.util.find_spec("flash_attn.bert_padding") is not None
    assert importlib.util.find_spec("flash_attn.cute") is None
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == compat.VERSION
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.metadata.version("numpy") == np.__version__
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn-4")
    version = pytest.importorskip("packaging.version")
    assert version.parse("2.8.3") < version.parse(compat.VERSION) < version.parse("2.9")


def test_uninstall_undoes_it() -> None:
    before = list(sys.meta_path)
    compat.install()
    compat.install()
    assert compat.is_installed()
    compat.uninstall()
    compat.uninstall()
    assert sys.meta_path == before
    assert not compat.is_installed()
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_one_is_not_shadowed_unless_asked(real: Path, imported: bool) -> None:
    if imported:
        importlib.import_module("flash_attn.layers")
    with pytest.raises(RuntimeError, match=r"already \(.*flash_attn.*replace=True"):
        compat.install()
    assert not compat.is_installed()
    compat.install(replace=True)
    assert sys.modules["flash_attn"].__version__ == compat.VERSION  # type: ignore[attr-defined]
    assert "flash_attn.layers" not in sys.modules
    compat.uninstall()
    assert importlib.import_module("flash_attn").__version__ == "2.0.0"
    assert ("flash_attn.layers" in sys.modules) == imported


def test_padding_helpers() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(2, 4, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    rows, indices, cu_seqlens, longest, used = compat.unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 5, 6, 7]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 2, 5], 3, [2, 3])
    assert (cu_seqlens.dtype, used.dtype) == (torch.int32, torch.int32)
    assert torch.equal(rows, compat.index_first_axis(x.reshape(8, 3), indices))
    padded = compat.pad_input(rows, indices, 2, 4)
    assert torch.equal(padded, x * mask[..., None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand(2, 4, 3).float())
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    rows, _, cu_seqlens, longest, used = compat.unpad_input(x, mask.bool(), unused.bool())
    assert (len(rows), cu_seqlens.tolist(), longest, used.tolist()) == (6, [0, 3, 6], 3, [2, 3])


# What docs/migrate.md says.


def test_differences_of_empty_rows_and_outputs() -> None:
    q, k = np.ones((1, 3, 2, 16), np.float16), np.ones((1, 1, 2, 16), np.float16)
    out, lse, mask = rtflash.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert mask is None
    assert not out[:, :2].any()
    assert np.isneginf(lse[..., :2]).all()
    assert np.isfinite(lse[..., 2]).all()  # bottom-right: the last query sees the one key


def test_differences_of_packed_sequences() -> None:
    q, cu = np.ones((6, 2, 16), np.float16), np.array([0, 2, 4], np.int32)
    out, lse, _ = rtflash.flash_attn_varlen_func(q, q, q, cu, cu, 2, 2, return_attn_probs=True)
    assert lse.shape == (2, 6)
    assert not out[4:].any()
    assert np.isneginf(lse[:, 4:]).all()
    with pytest.raises(TypeError, match="cu_seqlens_q is int64"):
        rtflash.flash_attn_varlen_func(q, q, q, cu.astype(np.int64), cu, 2, 2)
    with pytest.raises(ValueError, match="max_seqlen_q is 1"):
        rtflash.flash_attn_varlen_func(q, q, q, cu, cu, 1, 2)


def test_what_is_not_there_yet_is_refused() -> None:
    q = np.ones((1, 3, 2, 16), np.float16)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        rtflash.flash_attn_func(q, q, q, 0.1)
    torch = pytest.importorskip("torch")
    x = torch.ones((1, 3, 2, 16), dtype=torch.float16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="requires grad"):
        rtflash.flash_attn_func(x, x, x)


def test_what_is_more_than_flash_attentions() -> None:
    q, v = np.ones((2, 3, 2, 20), np.float16), np.ones((2, 3, 1, 7), np.float16)
    assert rtflash.flash_attn_func(q, q[:, :, :1], v, num_splits=2).shape == (2, 3, 2, 7)
    pages, table = np.ones((6, 1, 1, 20), np.float16), np.arange(6, dtype=np.int32).reshape(2, 3)
    lengths = np.array([3, 2], np.int32)
    out = rtflash.flash_attn_with_kvcache(
        q, pages, pages[..., :7], cache_seqlens=lengths, page_table=table
    )
    assert out.shape == (2, 3, 2, 7)
