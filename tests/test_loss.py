"""The loss against torch's, value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from anyformer.train.loss import IGNORE, cross_entropy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [[], [0, 3], list(range(7))], ids=["all", "some", "none"])
def test_value_and_gradient_are_torchs(dtype: torch.dtype, ignored: list[int]) -> None:
    logits = (4 * torch.randn(7, 11)).to(dtype).requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(11, (7,))
    targets[ignored] = IGNORE
    wide = twin.to(torch.float64 if dtype == torch.float64 else torch.float32)
    theirs = F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")
    ours = cross_entropy(logits, targets)
    (ours / 3).backward()
    (theirs / 3).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert ours.item() == pytest.approx(theirs.item(), abs=tolerance, rel=tolerance)
    torch.testing.assert_close(logits.grad, twin.grad, atol=tolerance, rtol=tolerance)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0]))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(1, 3))


def test_a_second_backward_pass_gives_the_same() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, 2]))
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])
