"""A program repeats what was recorded, on the values that lie there by then, and nothing else."""

import threading

import pytest
import torch

from tokenfleet.kernels import backend, recording
from tokenfleet.kernels.arguments import fields_of
from tokenfleet.kernels.logsumexp import logsumexp
from tokenfleet.kernels.norm import add_rms_norm, rms_norm
from tokenfleet.kernels.recording import NotRecordable, record, record_rows
from tokenfleet.kernels.workspace import Workspace, new_result

WIDTH = 64
NORM = torch.linspace(0.5, 1.5, WIDTH)


@pytest.fixture
def cpp():
    with backend.using("cpp"):
        yield


def layers(x, count, workspace=None):
    """Norms over a residual stream, the last one outside of the workspace, as in a decoder."""
    if workspace is not None:
        with workspace.open():
            added, residual = inner(x, count, workspace)
    else:
        added, residual = inner(x, count)
    return add_rms_norm(added, residual, NORM, 1e-5)[0]


def inner(x, count, workspace=None):
    added, residual = rms_norm(x, NORM, 1e-5), x
    for _ in range(count):
        if workspace is not None:
            workspace.next_layer()
        added, residual = add_rms_norm(added, residual, NORM, 1e-5)
        added = rms_norm(added, NORM, 1e-5)
    return added, residual


def test_a_program_gives_the_same_bits_as_the_operations_on_other_values(cpp):
    x, workspace = torch.randn(5, WIDTH), Workspace()
    program = record(lambda: layers(x, 7, workspace), workspace)
    for seed in range(4):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(program.run(), layers(x, 7))
    assert len(program) == 1 + 2 * 7 + 1


def test_programs_of_several_sizes_share_a_workspace_whatever_their_order(cpp):
    workspace = Workspace()
    xs = {rows: torch.randn(rows, WIDTH) for rows in (1, 9, 3)}
    programs = {
        rows: record(lambda x=x: layers(x, 3, workspace), workspace) for rows, x in xs.items()
    }
    for rows in (9, 1, 3, 1, 9):
        assert torch.equal(programs[rows].run(), layers(xs[rows], 3))


def test_a_program_outlives_the_memory_that_a_workspace_has_grown_out_of(cpp):
    workspace = Workspace()
    x = torch.randn(1, WIDTH)
    program = record(lambda: layers(x, 3, workspace), workspace)
    before = [memory.data_ptr() for memory in workspace.memory]
    with workspace.open():
        for _ in range(2):
            workspace.next_layer()
            new_result((4096, WIDTH), torch.float32).fill_(torch.nan)
    assert [memory.data_ptr() for memory in workspace.memory] != before
    assert torch.equal(program.run(), layers(x, 3))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: rms_norm(x.t().contiguous(), NORM[:5], 1e-5),
        lambda x: rms_norm(x, NORM + x.sum().item(), 1e-5),
    ],
)
def test_what_torch_computes_is_refused_instead_of_left_out(cpp, compute):
    x = torch.randn(5, WIDTH)
    with pytest.raises(NotRecordable):
        record(lambda: compute(x), Workspace())


def test_without_the_compiled_kernels_nothing_is_recorded():
    with backend.using("reference"), pytest.raises(NotRecordable, match="do not run here"):
        record(lambda: torch.empty(1), Workspace())


def test_a_program_is_out_of_date_once_other_kernels_were_chosen(cpp):
    x, workspace = torch.randn(2, WIDTH), Workspace()
    program = record(lambda: layers(x, 1, workspace), workspace)
    assert program.current
    with backend.using("reference"):
        assert not program.current
    assert program.current


def test_what_other_threads_compute_is_not_recorded(cpp):
    x, workspace = torch.randn(2, WIDTH), Workspace()

    foreign = torch.randn(3, WIDTH)

    def work():
        other = threading.Thread(target=layers, args=(foreign, 5))
        other.start()
        other.join()
        return layers(x, 1, workspace)

    assert len(record(work, workspace)) == 1 + 2 + 1


def test_results_of_a_layer_last_until_the_one_after_the_next():
    workspace = Workspace()
    with workspace.open():
        for _ in range(4):  # both pieces have grown by then
            workspace.next_layer()
            first = new_result((3, WIDTH), torch.float32).fill_(1.0)
            beside = new_result((3, WIDTH), torch.bfloat16).fill_(2.0)
        workspace.next_layer()
        new_result((6, WIDTH), torch.float32).fill_(3.0)
        assert (first == 1.0).all()
        assert (beside == 2.0).all()
        workspace.next_layer()
        assert new_result((3, WIDTH), torch.float32).data_ptr() == first.data_ptr()
    assert new_result((3, WIDTH), torch.float32).data_ptr() != first.data_ptr()


def test_results_start_at_a_cache_line():
    workspace = Workspace()
    with workspace.open():
        workspace.next_layer()
        places = [new_result((1, 3), torch.bfloat16).data_ptr() for _ in range(4)]
    assert len({place % 64 for place in places}) == 1
    assert len(set(places)) == 4


def test_a_program_of_rows_does_as_many_as_are_asked_for_and_touches_no_other(cpp):
    x, workspace = torch.full((9, WIDTH), torch.nan), Workspace()
    program = record_rows(lambda: layers(x, 5, workspace), workspace, 9)
    assert len(program) == 1 + 2 * 5 + 1
    for rows in (4, 9, 1, 7):
        x[:rows] = torch.randn((rows, WIDTH), generator=torch.Generator().manual_seed(rows))
        untouched = program.run(9, 1)[rows:].clone().fill_(7.0)
        whole = program.run(9, 1)
        whole[rows:] = untouched
        assert torch.equal(program.run(rows, 1), layers(x[:rows], 5))
        assert torch.equal(whole[rows:], untouched)


def test_rows_of_heads_are_counted_with_their_rows(cpp):
    x, norm, workspace = torch.randn(6, 4, 16), torch.ones(16), Workspace()
    program = record_rows(lambda: rms_norm(x, norm, 1e-5), workspace, 6)
    assert torch.equal(program.run(5, 1), rms_norm(x[:5], norm, 1e-5))


def test_a_kernel_without_a_number_of_rows_is_refused(cpp):
    logits = torch.randn(3, 50)
    with pytest.raises(NotRecordable, match="tf_logsumexp"):
        record_rows(lambda: logsumexp(logits), Workspace(), 3)


def test_every_argument_that_a_program_of_rows_changes_has_its_name_in_the_kernels_struct():
    for kernel, field in [*recording._ROWS_IN.items(), *recording._SEQUENCES_IN.items()]:
        assert field in fields_of(kernel)
    assert fields_of("tf_add_rms_norm")[3:7] == ("out", "total", "rows", "width")
    with pytest.raises(LookupError, match="tf_unheard_of"):
        fields_of("tf_unheard_of")
