"""What each rank does for a command, on its main thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from millrace import hub
from millrace.admission import choices
from millrace.admission.advice import across_hosts, advice
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import InvalidState, MillraceError, OutOfMemory, PartialOutOfMemory, PartialStep
from millrace.ids import JobId, Version
from millrace.memory.ledger import Phase
from millrace.shared_copies import SharedCopy, in_shared_memory
from millrace.spec import JobSpec
from millrace.telemetry.spans.context import TraceContext, within
from services.trainer.algorithms.functions import load_algorithms
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.background_saver import BackgroundSaver
from services.trainer.checkpoints.standby_copies import StandbyCopies
from services.trainer.memory import exhausted
from services.trainer.memory.exhausted import forget_models
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend
from services.trainer.publication.sender import Sender
from services.trainer.ranks import collectives
from services.trainer.ranks.commands import ControlThread, Handler
from services.trainer.ranks.world import World
from services.trainer.step.result import StepResult
from services.trainer.step.schedule import KlCoefficient
from services.trainer.step.step import Step

log = structlog.get_logger(__name__)
Result = TypeVar("Result")


@dataclass
class LoadedJob:
    """The job that is loaded on this rank."""

    id: JobId
    spec: JobSpec
    """The job spec. Names on the hub are paths on this host."""
    model: str
    """The model as the job names it: a folder, or a name on the hub."""
    backend: Backend
    version: Version
    coefficient: KlCoefficient
    meter: MemoryMeter
    step: Step | None = None
    """The step that is in progress: some of its groups were added."""


class Worker:
    """The handlers of one rank."""

    def __init__(self, world: World, control: ControlThread, sender: Sender, saver: BackgroundSaver) -> None:
        self._world = world
        self._control = control
        self._sender = sender
        self._saver = saver
        self._job: LoadedJob | None = None
        self._copies: list[SharedCopy] = []
        self._standby = StandbyCopies(world.rank)

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """What this rank does for each command."""
        return (
            Handler.of(TrainerRpc.Configure, self.configure),
            Handler.of(TrainerRpc.AddPart, self.add_part),
            Handler.of(TrainerRpc.Step, self.step),
            Handler.of(TrainerRpc.DescribeWeights, self.describe),
            Handler.of(TrainerRpc.PreparePublication, self.prepare),
            Handler.of(TrainerRpc.TransferPublication, self.transfer),
            Handler.of(TrainerRpc.Save, self.save),
            Handler.of(TrainerRpc.Load, self.load),
            Handler.of(TrainerRpc.CopyState, self.copy_state),
            Handler.of(TrainerRpc.ReceiveState, self.receive_state),
        )

    def configure(self, request: pb.ConfigureTrainerRequest) -> pb.ConfigureTrainerResponse:
        self._sender.close()
        self._free_job()
        with collectives.fail_together():
            asked = JobSpec.model_validate_json(request.spec)
            spec = hub.local(asked, weights=True)
            choices.check(spec)
            load_algorithms((kind, choice.name) for kind, choice, _ in choices.chosen(spec.algorithm))
            read_from, self._copies = in_shared_memory(spec)
        with self._loading("loading the model", spec):
            backend = build(read_from, self._world.device)
            coefficient = KlCoefficient(spec.algorithm.kl_coefficient)
            meter = MemoryMeter(spec, backend, self._world.rank, self._world.size)
            job = LoadedJob(JobId(request.job_id), spec, asked.model.path, backend, Version(0), coefficient, meter)
            if request.checkpoint:
                self._load_checkpoint(job, request.checkpoint)
        self._job = job
        log.info("configured", job=job.id, version=job.version, rank=self._world.rank, parameters=backend.parameters)
        across = across_hosts(spec, self._world.size, self._world.ranks_per_host)
        warnings = [str(one) for one in (*across, *advice(spec))]
        for warning in warnings if self._world.rank == 0 else ():
            log.warning(warning)
        return pb.ConfigureTrainerResponse(
            version=job.version,
            world_size=self._world.size,
            parameters=backend.parameters,
            warnings=warnings,
            microbatches_at_once=backend.data_parallel.microbatches_at_once,
        )

    def add_part(self, request: pb.AddPartRequest) -> pb.AddPartResponse:
        self._stepped(request.part, lambda step: None)
        return pb.AddPartResponse()

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        result = self._stepped(request, lambda step: step.finish())
        job = self._loaded()
        job.step, job.version = None, Version(request.step)
        return _response(job.version, result, self._world.rank)

    def _stepped(self, request: pb.StepRequest, then: Callable[[Step], Result]) -> Result:
        """Adds the request's groups to the step, and goes on with `then`. Without parts before it the step begins anew.
        After a failure no step is in progress."""
        job = self._loaded()
        try:
            with within(TraceContext.parse(request.traceparent, job_id=request.job_id, step=request.step)):
                return then(self._added(job, request))
        except PartialStep:
            self._job = None
            raise
        except OutOfMemory as error:
            what, fix = error.what, error.fix
        except MillraceError:
            job.step = None
            raise
        # Outside of the handler: the exception holds the frames of the failed pass, and they hold its tensors.
        job.step = None
        if self._world.size == 1:  # other ranks are in the middle of a pass, and wait for this one
            exhausted.recover(job.backend)
        if job.meter.updated:
            self._job = None
            raise PartialOutOfMemory(what, fix)
        raise OutOfMemory(what, fix)

    def _added(self, job: LoadedJob, request: pb.StepRequest) -> Step:
        """The step in progress, or a new one, with the request's groups. Raises InvalidState if it has not the parts
        before them."""
        if request.part == 0:
            if job.step is not None:
                job.step.abandon()
            job.step = Step(job.spec, job.backend, request, self._control, job.coefficient, job.meter)
        if job.step is None or (job.step.number, len(job.step.parts)) != (request.step, request.part):
            what = f"step {request.step} of {job.id} has not the {request.part} parts before this one."
            raise InvalidState(what, "add its groups from part 0 on.")
        job.step.add(request)
        return job.step

    def describe(self, request: pb.DescribeSendRequest) -> pb.DescribeSendResponse:
        with self._publishing("describing what is published") as job:
            return self._sender.describe(request, job.backend)

    def prepare(self, request: pb.PrepareSendRequest) -> pb.PrepareSendResponse:
        with self._publishing("preparing a publication") as job:
            return self._sender.prepare_send(request, job.backend, job.version)

    def transfer(self, request: pb.TransferSendRequest) -> pb.TransferSendResponse:
        with self._publishing("a publication") as job:
            sent = self._sender.transfer(request, job.backend, job.version)
        job.meter.measure(Phase.PUBLICATION)
        return sent

    def save(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """Saves a checkpoint in the background, or before it returns if the job says so."""
        job, began = self._loaded(), time.monotonic()
        with collectives.fail_together():
            self._saver.check_free()
        background = job.spec.schedule.save_in_background
        pending = checkpoint.copy_for_saving(
            request.path,
            job.backend,
            job_id=job.id,
            version=job.version,
            model=job.spec.model.path,
            model_name=job.model,
            weights=job.spec.model.weights,
            huggingface=request.huggingface,
            kl_coefficient=job.coefficient.value,
            copied=background,
        )
        if background:
            self._saver.begin(pending, job.spec.deadlines.save_s, began)
        else:
            size = checkpoint.write_now(pending)
            seconds = time.monotonic() - began
            self._saver.record(pb.FinishSaveResponse(version=job.version, bytes=size, seconds=seconds))
        return pb.SaveResponse(version=job.version, seconds=time.monotonic() - began)

    def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        job, self._job = self._loaded(), None  # no job is loaded until the checkpoint is read completely
        if job.step is not None:
            job.step.abandon()
            job.step = None
        with self._loading("reading a checkpoint", job.spec):
            self._load_checkpoint(job, request.path)
        self._job = job
        return pb.LoadResponse(version=job.version)

    def copy_state(self, request: pb.CopyStateRequest) -> pb.CopyStateResponse:
        """Copies the state to host memory, and begins to send it to trainers that stand by."""
        job, began = self._loaded(), time.monotonic()
        limit_s, receivers = job.spec.deadlines.save_s, len(request.receivers)
        meet = self._standby.send(job.backend, job.version, job.coefficient.value, receivers, limit_s)
        return pb.CopyStateResponse(version=job.version, seconds=time.monotonic() - began, rendezvous=meet)

    def receive_state(self, request: pb.ReceiveStateRequest) -> pb.ReceiveStateResponse:
        """Receives the state of a version, and puts it in place once all ranks hold all of it."""
        job, version = self._loaded(), Version(request.version)
        header = self._standby.receive(request.rendezvous, version, job.backend, job.spec.deadlines.save_s)
        self._job = None  # no job is loaded until the copy is in place
        with self._loading("putting a copy in place", job.spec):
            self._standby.put_in_place(job.backend, header)
        job.version, job.coefficient.value = version, header.kl_coefficient
        self._job = job
        return pb.ReceiveStateResponse(version=version)

    def release_copies(self) -> None:
        """Ends the use of model folders in shared memory, and copies to trainers that stand by."""
        self._standby.close()
        while self._copies:
            self._copies.pop().release()

    def _free_job(self) -> None:
        """Frees the memory of the loaded job: two models at once would not fit. Models have reference cycles."""
        self._job = None
        self.release_copies()
        forget_models(self._world.device)

    def _load_checkpoint(self, job: LoadedJob, path: str) -> None:
        loaded = checkpoint.load(path, job.backend)
        saved, configured = loaded.kl_coefficient, job.spec.algorithm.kl_coefficient
        job.version, job.coefficient.value = loaded.version, configured if saved is None else saved

    def _loading(self, work: str, spec: JobSpec) -> AbstractContextManager[None]:
        return exhausted.report_out_of_memory(work, Phase.LOAD, spec, self._world.rank, self._world.size)

    @contextmanager
    def _publishing(self, work: str) -> Iterator[LoadedJob]:
        """Raises PublicationFailed if every rank knows that one of them has no memory left, and OutOfMemory on that
        rank alone if the others may wait for it."""
        job, ranks = self._loaded(), self._world.size
        with (
            exhausted.report_out_of_memory(work, Phase.PUBLICATION, job.spec, self._world.rank, ranks),
            exhausted.report_out_of_memory_on_all_ranks(work, Phase.PUBLICATION, job.spec, self._world.device, ranks),
        ):
            yield job

    def _loaded(self) -> LoadedJob:
        if self._job is None:
            raise InvalidState("no job is loaded on this rank.", "configure the trainer first.")
        return self._job


def _response(version: Version, result: StepResult, rank: int) -> pb.StepResponse:
    """The answer of a rank. Only that of rank 0 reaches the coordinator, so the others leave out what is large."""
    response = pb.StepResponse(version=version, metrics=result.metrics)
    if rank:
        return response
    response.shown.extend(result.shown)
    for key, histogram in result.histograms.items():
        response.histograms[key].CopyFrom(pb.Histogram(edges=histogram.edges, counts=histogram.counts))
    return response
