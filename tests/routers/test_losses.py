"""The losses against plain Python, and against what they are meant to measure."""

import math

import pytest
import torch
import torch.distributed as dist

from moe_routing_kernels.routers import losses

T, E, K = 40, 6, 2


def drawn(seed=0):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=rng)
    return logits, logits.softmax(1), logits.topk(K, dim=1).indices.int()


def share(ids, experts):
    flat = [e for row in ids.tolist() for e in row if 0 <= e < experts]
    return [flat.count(e) / len(flat) for e in range(experts)]


def dot(f, scores):
    return len(f) * sum(a * b for a, b in zip(f, scores.mean(0).tolist(), strict=True))


def test_counts_leave_out_empty_slots_and_what_is_not_an_expert():
    ids = torch.tensor([[0, -1, 2], [2, 3, -1], [2, 7, 6], [-1, -1, -1]])
    assert losses.counts(ids, 3).tolist() == [1, 0, 3] and losses.counts(ids, 8).tolist() == [1, 0, 3, 1, 0, 0, 1, 1]


def test_switch_is_one_when_balanced_and_e_when_collapsed():
    _, scores, ids = drawn()
    assert losses.switch(scores, ids).item() == pytest.approx(dot(share(ids, E), scores))
    even = torch.full((T, E), 1 / E)
    assert losses.switch(even, torch.arange(T)[:, None] % E).item() == pytest.approx(1)
    one = torch.nn.functional.one_hot(torch.zeros(T, dtype=torch.long), E).float()
    assert losses.switch(one, torch.zeros(T, 1)).item() == pytest.approx(E)


def test_descending_the_switch_loss_balances():
    logits = (
        torch.randn(T, E, generator=torch.Generator().manual_seed(0)) * 0.1 + torch.arange(E) * 0.1
    ).requires_grad_()
    before = losses.cv_squared(losses.counts(logits.topk(K, dim=1).indices, E))
    for _ in range(100):
        loss = losses.switch(logits.softmax(1), logits.topk(K, dim=1).indices)
        (grad,) = torch.autograd.grad(loss, logits)
        logits.data.sub_(grad.mean(0) * T)  # the same for all tokens, as a router's bias would move
    after = losses.cv_squared(losses.counts(logits.topk(K, dim=1).indices, E))
    assert after < before / 4


def test_sequence_wise_is_the_mean_over_sequences():
    _, scores, ids = drawn()
    parts = [dot(share(i, E), s) for s, i in zip(scores.chunk(4), ids.chunk(4), strict=True)]
    assert losses.sequence(scores, ids, 4).item() == pytest.approx(sum(parts) / 4)
    assert losses.sequence(scores, ids, 1).item() == pytest.approx(losses.switch(scores, ids).item())


def test_device_loss_is_over_groups():
    _, scores, ids = drawn()
    groups = scores.unflatten(1, (3, 2)).sum(2)
    assert losses.device(scores, ids, 3).item() == pytest.approx(dot(share(ids // 2, 3), groups))
    assert losses.device(scores, ids, E).item() == pytest.approx(losses.switch(scores, ids).item())


def _rank(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    _, scores, ids = drawn(rank)
    results[rank] = losses.global_batch(scores, ids).item()
    dist.destroy_process_group()


def test_global_batch_takes_the_load_of_all_ranks(tmp_path):
    (_, scores, ids), (_, other, elsewhere) = drawn(0), drawn(1)
    assert losses.global_batch(scores, ids).item() == pytest.approx(losses.switch(scores, ids).item())
    found = torch.zeros(2, dtype=torch.float64).share_memory_()
    # Forked ranks need no imports of their own, which take seconds; this process has computed on one thread.
    torch.multiprocessing.start_processes(_rank, (tmp_path / "ranks", found), nprocs=2, start_method="fork")
    f = share(torch.cat([ids, elsewhere]), E)
    assert found.tolist() == pytest.approx([dot(f, scores), dot(f, other)])


def test_importance_is_the_squared_cv_of_the_weights():
    _, scores, _ = drawn()
    sums = scores.sum(0).tolist()
    mean = sum(sums) / E
    assert losses.importance(scores).item() == pytest.approx(sum((s - mean) ** 2 for s in sums) / E / mean**2, rel=1e-4)


def test_load_is_a_smooth_estimate_of_the_real_load():
    """Its probability is that of being chosen when the expert's own noise is drawn again: compared by drawing it."""
    rng = torch.Generator().manual_seed(0)
    clean, spread = torch.randn(T, E, generator=rng), torch.rand(T, E, generator=rng) + 0.5
    noisy = clean + spread * torch.randn(T, E, generator=rng)
    draws, expected = 4000, torch.zeros(E)
    for e in range(E):
        again = noisy.repeat(draws, 1, 1)
        again[:, :, e] = clean[:, e] + spread[:, e] * torch.randn(draws, T, generator=rng)
        expected[e] = (again.topk(K, dim=2).indices == e).any(2).float().mean(0).sum()
    assert losses.load(clean, noisy, spread, K).item() == pytest.approx(losses.cv_squared(expected).item(), rel=0.05)


def test_z_loss_and_entropy():
    logits, scores, _ = drawn()
    z = [math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()]
    assert losses.z(logits).item() == pytest.approx(sum(z) / T, rel=1e-5)
    entropy = [-sum(p * math.log(p) for p in row) for row in scores.tolist()]
    assert losses.entropy(scores).item() == pytest.approx(sum(entropy) / T, rel=1e-5)
    certain = torch.tensor([[1e4, 0.0]], requires_grad=True)
    losses.entropy(certain.softmax(1)).backward()
    assert certain.grad.isfinite().all()  # a probability of 0 has no infinite gradient
