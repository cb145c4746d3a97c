"""Which logits a mask of bits leaves."""

import pytest
import torch

from tokenfleet.kernels.token_mask import allow_only, reference

pytestmark = pytest.mark.usefixtures("triton_kernels")


def masks(count, width, seed=0):
    """(bool [count, width], the same as words)."""
    rng = torch.Generator().manual_seed(seed)
    allowed = torch.rand(count, width, generator=rng) < 0.4
    filled = torch.nn.functional.pad(allowed, (0, -width % 32)).view(count, -1, 32).long()
    words = (filled << torch.arange(32)).sum(-1)
    return allowed, torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("form", [allow_only, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("vocab", [1, 63, 259, 4099])
@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [2, 4]], ids=str)
def test_exactly_what_is_not_allowed_becomes_impossible(form, vocab, rows, device, guarded):
    R = 3 if len(rows) == 3 else 5
    logits = torch.randn(R, vocab, generator=torch.Generator().manual_seed(1))
    allowed, words = masks(len(rows), vocab)
    expected = logits.clone()
    for row, kept in zip(rows, allowed, strict=True):
        expected[row, ~kept] = -torch.inf
    mine = guarded(logits.shape, torch.float32)
    mine.copy_(logits)
    form(mine, torch.tensor(rows, device=device), words.to(device))
    assert torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("form", [allow_only, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("width", [1, 64, 1000])
def test_the_vocabulary_may_be_wider_or_narrower_than_the_words(form, width, device):
    logits = torch.zeros(2, 259, device=device)
    _, words = masks(2, width)
    words[:] = -1
    form(logits, torch.arange(2, device=device), words.to(device))
    kept = min(259, 32 * words.shape[1])
    assert (logits[:, :kept] == 0).all()
    assert (logits[:, kept:] == -torch.inf).all()
