"""pdcompiler: pipeline-parallel training by compiling an ordinary PyTorch model. See `compile`."""

from pdcompiler.core.asynchronous import Asynchronous
from pdcompiler.core.errors import CompileError, DeadlockError, PdcompilerError, VerifyError, WorkerError
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.schedule import Schedule
from pdcompiler.entry import compile
from pdcompiler.outputs import StepResult
from pdcompiler.pipeline import Pipeline

__all__ = [
    "Asynchronous",
    "CompileError",
    "DeadlockError",
    "Machine",
    "Partition",
    "PdcompilerError",
    "Pipeline",
    "Schedule",
    "StepResult",
    "VerifyError",
    "WorkerError",
    "compile",
]
