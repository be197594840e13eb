"""Subjects of other libraries: tiny random models, each made when asked for."""

from __future__ import annotations

from collections.abc import Callable

from anyformer.check.subject import Subject
from findings.hub_subjects import HUB_SUBJECTS
from findings.torch_subjects import TORCH_SUBJECTS
from findings.x_subjects import X_SUBJECTS

SUBJECTS: dict[str, Callable[[], Subject]] = HUB_SUBJECTS | X_SUBJECTS | TORCH_SUBJECTS
