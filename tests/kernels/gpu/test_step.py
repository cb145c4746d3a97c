"""What a captured step does around its layers, against the operations one by one."""

import pytest
import torch

from tokenfleet.kernels.backend import using
from tokenfleet.kernels.gpu.launch import TARGETS, recording
from tokenfleet.kernels.step import POISONED, StepTokens, look_up, settle

pytestmark = [
    pytest.mark.usefixtures("triton_kernels"),
    # numpy, which interprets, warns of the infinities that are meant
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]


@pytest.mark.parametrize(("lens", "width"), [([1], 9), ([1] * 5, 3), ([1, 1, 700, 600], 1300)])
def test_tokens_and_tables_are_looked_up_as_one_by_one(lens, width, device):
    S, T, slots, size = len(lens), sum(lens), 7, 16
    random = torch.Generator().manual_seed(T)

    def some(high, *shape):
        return torch.randint(0, high, shape, generator=random).to(device)

    owners = torch.randperm(slots, generator=random)[:S].to(device)
    starts = torch.tensor([0, *lens], device=device).cumsum(0)
    of_token = owners.repeat_interleave(torch.tensor(lens, device=device))
    of_token[-1] = slots  # padding
    tokens = StepTokens(
        some(1000, T), some(2, T), some(width * size, T), of_token, owners, some(500, S), starts
    )
    newest, blocks = some(1000, slots + 1), some(50, slots + 1, width).int()
    blocks[-1] = 0
    got = look_up(tokens, newest, blocks, size)
    with using("reference"):
        expected = look_up(tokens, newest, blocks, size)
    for name in ("ids", "kv_slots", "query_starts", "kv_lens", "block_tables"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name
    assert got.kv_slots[-1] == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_draws", [False, True])
@pytest.mark.parametrize("vocab", [1, 63, 2100])
def test_a_row_gets_its_best_token_or_its_draw_and_a_broken_one_a_verdict(
    vocab, with_draws, dtype, device
):
    R, random = 9, torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (R, vocab), generator=random).float().to(device)  # full of ties
    hidden = torch.randn(R, 1100, generator=random).to(dtype).to(device)
    logits[1, vocab // 2], hidden[2, 5], hidden[3, 1099] = torch.nan, torch.nan, -torch.inf
    logits[4], logits[5, 0] = -torch.inf, torch.inf
    slots = torch.arange(R, device=device).flip(0)
    ends = torch.ones(R, dtype=torch.int64, device=device)
    ends[6] = 0
    is_greedy = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0, 1], device=device)
    drawn = torch.randint(0, vocab, (R,), generator=random).to(device) if with_draws else None
    made = {}
    for choice in ("triton", "reference"):
        newest = torch.full((R + 1,), 77, device=device)
        verdicts = torch.full((R,), 99, device=device)
        with using(choice):
            settle(logits, hidden, drawn, is_greedy, slots, ends, newest, verdicts)
        made[choice] = newest, verdicts
    (newest, verdicts), (expected_newest, expected) = made["triton"], made["reference"]
    assert torch.equal(verdicts, expected)
    assert verdicts[1:6].eq(POISONED).all()
    sound = torch.tensor([0, 7, 8], device=device)
    assert torch.equal(newest[slots[sound]], expected_newest[slots[sound]])
    assert (newest[slots[6]], newest[R]) == (77, 77)
    assert ((newest >= 0) & (newest < max(vocab, 78))).all()


def test_one_binary_settles_any_number_of_rows():
    keys = set()
    for R in (1, 2, 16, 128):
        many = torch.empty(R, device="meta").long()
        hidden = torch.empty(R, 64, device="meta")
        with recording(TARGETS[90]) as launches:
            logits = torch.empty(R, 151936, device="meta")
            settle(logits, hidden, None, many, many, many, many, many)
            starts = torch.empty(R + 1, device="meta").long()
            blocks = torch.empty(9, 64, device="meta").int()
            look_up(StepTokens(many, many, many, many, many, many, starts), many, blocks, 16)
        keys.add(frozenset(launch.key() for launch in launches))
    assert len(keys) == 1


def test_words_of_any_bucket_are_read_by_the_same_binaries():
    """They lie where the words of a step put them: at any multiple of eight bytes."""
    keys = []
    for first in (0, 1):
        words = torch.empty(64, device="meta").long()[first:]
        newest, blocks = torch.empty(9, device="meta").long(), torch.empty(9, 64, device="meta")
        with recording(TARGETS[90]) as launches:
            one = words[:4]
            tokens = StepTokens(one, one, one, one, one, one, words[:5])
            look_up(tokens, newest, blocks.int(), 16)
            logits, hidden = (torch.empty(4, n, device="meta") for n in (999, 64))
            settle(logits, hidden, one.clone(), one, one, one, newest, newest[:4])
        keys.append([launch.key() for launch in launches])
    assert keys[0] == keys[1]
