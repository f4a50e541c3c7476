/* Made by web/rest_types.py from millrace/rest and millrace/events. */

/** One metric at each point of a curve; null if no step of the point has it. */
export interface BandView {
  mean: (number | string | null)[];
  least: (number | string | null)[];
  greatest: (number | string | null)[];
}

/** What slows a job down. */
export type Bottleneck = "generation" | "long_tail" | "rewards" | "environment" | "trainer" | "publication" | "queue" | "memory" | "staleness_bound" | "evaluation" | "checkpoint";

/** One thing that a sandbox keeps apart. */
export type Boundary = "processes" | "files" | "network" | "ipc" | "user" | "limits";

/** What may help. */
export interface ChangeView {
  setting: string;
  advice: string;
}

/** Another checkpoint is the best one by `schedule.keep_best`. */
export interface CheckpointBest {
  kind: "checkpoint.best";
  step: number;
  path: string;
  metric: string;
  value: number | string;
}

/** A checkpoint is in the object store too, whole. */
export interface CheckpointCopied {
  kind: "checkpoint.copied";
  step: number;
  url: string;
  bytes: number;
  seconds: number | string;
}

/** A checkpoint could not be copied to the object store; it is on the disk. */
export interface CheckpointCopyFailed {
  kind: "checkpoint.copy_failed";
  step: number;
  store: string;
}

/** A checkpoint could not be written; the one before stays the newest. */
export interface CheckpointFailed {
  kind: "checkpoint.failed";
  step: number;
  path: string;
}

/** A checkpoint is on the disk. */
export interface CheckpointSaved {
  kind: "checkpoint.saved";
  step: number;
  path: string;
  bytes: number | null;
  seconds: number | string | null;
}

/** The prompts of one evaluation. */
export interface Coverage {
  scored: number;
  asked: number;
}

/** The data files of a section of the job spec were opened, before the first prompt was issued. */
export interface DataOpened {
  kind: "data.opened";
  section: "data" | "evaluation";
  rows: number;
  description: string[];
}

/** What slows a job down, and what to change. */
export interface DiagnosisView {
  job_id: string;
  from_step: number;
  to_step: number;
  step_s: number;
  bottleneck: Bottleneck | null;
  findings: FindingView[];
  loop_s: Record<string, number>;
  simulated_s: number | null;
  forecasts: ForecastView[];
  from_spans: boolean;
}

/** DropReason of proto/millrace/v1/common.proto. The ledger, events, Prometheus and REST use these values. */
export type DropReason = "unspecified" | "bad_row" | "bad_prompt" | "prompt_too_long" | "bad_logprobs" | "reward_failed" | "incomplete_group" | "malformed_group" | "group_too_large" | "environment_failed" | "replica_failed" | "killed_replicas" | "no_signal" | "too_stale" | "job_succeeded" | "job_failed" | "job_cancelled" | "job_preempted";

/** The held-out prompts were scored. */
export interface EvaluationDone {
  kind: "evaluation.done";
  step: number;
  version: number;
  metrics: Record<string, number | string>;
}

/** One entry of a job's event log. */
export interface Event {
  id: string;
  time_s: number;
  message: string;
  data: JobMoved | JobWaiting | JobRewound | JobStopping | DataOpened | TrainerConfiguring | TrainerConfigured | TrainerLost | TrainerLeft | TrainerOutOfMemory | MemberJoined | MemberConfigured | MemberFailed | MemberJoining | MemberHandedOver | MemberOut | MemberDied | ReplicasScaled | PromptDropped | LeaseExpired | GroupStale | GroupDropped | StepDone | TrainingWarning | PublicationDone | PublicationFailed | EvaluationDone | CheckpointSaved | CheckpointBest | CheckpointFailed | CheckpointCopied | CheckpointCopyFailed | TrackerFailed | ReportFailed | WebhookFailed | OtherRelease;
  kind: EventKind | string;
}

export type EventKind = "job.state" | "job.waiting" | "job.rewound" | "job.stopping" | "data.opened" | "trainer.configuring" | "trainer.configured" | "trainer.lost" | "trainer.left" | "trainer.out_of_memory" | "member.joined" | "member.configured" | "member.failed" | "member.joining" | "member.handed_over" | "member.out" | "member.died" | "replicas.scaled" | "prompt.dropped" | "lease.expired" | "group.stale" | "group.dropped" | "step.done" | "training.warning" | "publication.done" | "publication.failed" | "evaluation.done" | "checkpoint.saved" | "checkpoint.best" | "checkpoint.failed" | "checkpoint.copied" | "checkpoint.copy_failed" | "tracker.failed" | "report.failed" | "webhook.failed";

/** A number that speaks for a finding. */
export interface FigureView {
  name: string;
  value: number;
  unit: Unit;
  meaning: string;
}

/** Something that slows the job down. */
export interface FindingView {
  bottleneck: Bottleneck;
  share: number;
  seconds: number;
  message: string;
  member: string;
  figures: FigureView[];
  changes: ChangeView[];
}

export interface FleetView {
  epoch: number;
  trainers: MemberView[];
  replicas: MemberView[];
}

/** What a step would take with another setting, by simulation with the job's own lengths and rates. */
export interface ForecastView {
  setting: string;
  value: number | boolean;
  step_s: number;
}

/** A GPU that a member may use, with the work of all processes on it. What it does not report is null. */
export interface GpuView {
  host: string;
  gpu: string;
  used_bytes: number;
  size_bytes: number;
  busy: number | null;
  power_w: number | null;
  temperature_c: number | null;
}

/** Groups without a training signal were dropped. */
export interface GroupDropped {
  kind: "group.dropped";
  reason: DropReason;
  prompts: string[];
}

/** One page of groups, the newest first. */
export interface GroupPage {
  groups: GroupView[];
  next: number | null;
  total: number;
}

/** Groups are older than the staleness bound allows; their prompts are issued again. */
export interface GroupStale {
  kind: "group.stale";
  prompts: string[];
}

/** The samples of one prompt in one step. */
export interface GroupView {
  step: number;
  prompt_id: string;
  purpose: string;
  data_source: string;
  samples: SampleView[];
}

/** Why a replica goes from one partition to another. */
export type HandOverReason = "first" | "share" | "demand" | "refused";

/** How one quantity was distributed in some steps of a job. */
export interface HistogramView {
  key: string;
  unit: string;
  meaning: string;
  fixed: boolean;
  whole_numbers: boolean;
  steps: number[];
  edges: number[][];
  counts: number[][];
}

/** Memory of a member's host. */
export interface HostView {
  host: string;
  process_bytes: number;
  used_bytes: number;
  size_bytes: number;
}

/** Why a trainer or a replica did nothing for the job. */
export type IdleCause = "starting" | "generation" | "long_tail" | "rewards" | "environment" | "queue" | "trainer" | "staleness_bound" | "publication" | "evaluation" | "checkpoint" | "coordination" | "unknown";

/** Time in which a service did nothing for the job. */
export interface IdleView {
  start_s: number;
  end_s: number;
  cause: IdleCause;
}

/** One image of a prompt. `GET /v1/jobs/{job_id}/prompts/{prompt_id}/images/{number}` answers its file. */
export interface ImageView {
  media_type: string;
  width: number | null;
  height: number | null;
  bytes: number;
  sha256: string;
}

/** The job has another state. The first event of a job, and the last of one that has ended. */
export interface JobMoved {
  kind: "job.state";
  state: JobState;
}

/** One page of the list of jobs, the newest first. */
export interface JobPage {
  jobs: JobSummary[];
  next: string | null;
  total: number;
}

/** A job as it was at one time. */
export interface JobReport {
  time_s: number;
  job: JobView;
  last: StepMetrics | null;
  keys: MetricView[];
  series: SeriesView;
  histograms: HistogramView[];
  diagnosis: DiagnosisView | null;
  groups: GroupView[];
  images: Record<string, string>;
  missing_images: Record<string, string>;
  ledger: LedgerView;
  publications: PublicationDone[];
  events: Event[];
  spec: SpecView;
  fleet: FleetView;
}

/** What was asked of a job and is not carried out yet. */
export type JobRequest = "pause" | "cancel";

/** The trainer holds older weights than the ledger has counted; the steps since then are trained again. */
export interface JobRewound {
  kind: "job.rewound";
  version: number;
  lost: number;
  prompts: number;
  kept: number;
  discarded: number;
}

export type JobState = "queued" | "starting" | "running" | "paused" | "succeeded" | "failed" | "cancelled";

/** The job ends before its last step, by `schedule.stop_when`. */
export interface JobStopping {
  kind: "job.stopping";
  step: number;
  metric: string;
  cause: "solved" | "flat";
}

/** A job without its spec. */
export interface JobSummary {
  id: string;
  name: string;
  state: JobState;
  pending: JobRequest | null;
  waiting: WaitingView | null;
  warnings: WarningView[];
  step: number;
  steps: number;
  steps_known: boolean;
  version: number;
  reward: number | null;
  evaluation_before: number | null;
  evaluation_before_coverage: Coverage | null;
  evaluation_last: number | null;
  evaluation_last_coverage: Coverage | null;
  evaluation_step: number | null;
  created_s: number;
  queued_s: number;
  ran_s: number;
  finished_s: number | null;
  tags: string[];
  notes: string;
  user: string;
  partition: string;
  priority: number;
  checkpoint: string | null;
  report: string | null;
  failure: string | null;
  status: string;
}

/** A job. */
export interface JobView {
  id: string;
  name: string;
  state: JobState;
  pending: JobRequest | null;
  waiting: WaitingView | null;
  warnings: WarningView[];
  step: number;
  steps: number;
  steps_known: boolean;
  version: number;
  reward: number | null;
  evaluation_before: number | null;
  evaluation_before_coverage: Coverage | null;
  evaluation_last: number | null;
  evaluation_last_coverage: Coverage | null;
  evaluation_step: number | null;
  created_s: number;
  queued_s: number;
  ran_s: number;
  finished_s: number | null;
  tags: string[];
  notes: string;
  user: string;
  partition: string;
  priority: number;
  checkpoint: string | null;
  report: string | null;
  failure: string | null;
  whole_steps: string;
  spec: Record<string, unknown>;
  advice: Mistake[];
  status: string;
}

/** The job waits for something, and has done so for some seconds. */
export interface JobWaiting {
  kind: "job.waiting";
  reason: WaitingFor;
}

/** What a lane of the timeline shows. */
export type LaneKind = "coordinator" | "trainer" | "rollout" | "rewards" | "environment";

/** What one service did in the window. */
export interface LaneView {
  member: string;
  kind: LaneKind;
  spans: SpanView[];
  idle: IdleView[];
  idle_s: Record<string, number>;
}

/** Leases were not extended in time; their prompts go to other replicas. */
export interface LeaseExpired {
  kind: "lease.expired";
  prompts: string[];
}

/** The state of every prompt of the job. `issued` is the sum of the other counts. */
export interface LedgerView {
  issued: number;
  queued: number;
  leased: number;
  generated: number;
  trained: number;
  dropped: number;
  reasons: Record<string, number>;
}

export interface LogLineView {
  time: string;
  level: string;
  message: string;
  details: string;
}

/** The newest lines that a service has logged. */
export interface LogView {
  member: string;
  lines: LogLineView[];
}

/** A replica's engine is ready. One that generates still needs the current weights. */
export interface MemberConfigured {
  kind: "member.configured";
  member: string;
  engine: string;
  pool: string;
  kept_engine: boolean;
  engine_changes: string[];
}

/** A member died while it worked for the job, which is charged with the death; or its next life reported how it ended. The message has its last words. */
export interface MemberDied {
  kind: "member.died";
  member: string;
  deaths: number | null;
}

/** A replica could not be configured for the job, or refused it. */
export interface MemberFailed {
  kind: "member.failed";
  member: string;
  refused: boolean;
  pool: string;
}

/** A replica goes over to the job of another partition. It returns its leases with what they have got; they go to other replicas of its job. Both jobs get this event. */
export interface MemberHandedOver {
  kind: "member.handed_over";
  member: string;
  before: string;
  partition: string;
  reason: HandOverReason;
}

/** A replica registered and is being configured for the job. */
export interface MemberJoined {
  kind: "member.joined";
  member: string;
  epoch: number;
  pool: string;
}

/** Replicas without weights are being sent the current version. */
export interface MemberJoining {
  kind: "member.joining";
  members: string[];
  sender: string;
}

export type MemberKind = "trainer" | "rollout";

/** A replica left or was lost; its leases go to other replicas. */
export interface MemberOut {
  kind: "member.out";
  member: string;
  prompts: string[];
}

export type MemberState = "idle" | "configuring" | "joining" | "serving" | "draining" | "left" | "lost";

/** What one member moved in a publication, and how long each part took there. */
export interface MemberTransfer {
  member: string;
  bytes: number;
  prepare_s: number | string;
  gather_s: number | string;
  wire_s: number | string;
  verify_s: number | string;
  apply_s: number | string;
  pause_s: number | string;
  loader_tensors: number;
  loader_bytes: number;
  staging_bytes: number;
  mode: number;
  loader_names: string[];
  sent_bytes: number;
  changed: number | string;
  code_s: number | string;
  snapshot_bytes: number;
  idle_ratio: number | string | null;
}

export interface MemberView {
  id: string;
  kind: MemberKind;
  pool: string;
  partition: string;
  address: string;
  engine: string;
  engine_release: string;
  world_size: number;
  host: string;
  device: string;
  metrics_address: string;
  sessions_address: string;
  state: MemberState;
  version: number;
  running: number;
  waiting: number;
  free: number;
  leases: number;
  tokens: number;
  tokens_per_s: number;
  cache_used: number | null;
  hosts: HostView[];
  gpus: GpuView[];
  silent_s: number;
  trouble: string;
  gone: string;
  missing_boundaries: Record<string, string>;
}

/** A step metric that a job has. */
export interface MetricView {
  key: string;
  section: string;
  unit: string;
  meaning: string;
}

/** One thing that is wrong in what a user wrote: a job spec, the body of a request, an option of a command. */
export interface Mistake {
  field: string;
  reason: string;
  fix: string;
  value: string;
  line: number;
}

/** A kind of event, or a payload, that this release does not know: the coordinator is of another release. */
export interface OtherRelease {
  kind: string;
  [other: string]: unknown;
}

/** An error, as RFC 9457 describes it, with what to do next. */
export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  fix: string;
  mistakes: Mistake[];
}

/** A prompt produced no usable samples: its data row is bad, or a replica refused it. */
export interface PromptDropped {
  kind: "prompt.dropped";
  reason: DropReason;
  prompt: string | null;
  lease: string | null;
  member: string | null;
}

/** Replicas serve a version of the weights. */
export interface PublicationDone {
  kind: "publication.done";
  version: number;
  epoch: number;
  attempt: number;
  content: "model" | "base" | "adapter";
  source: "trainer" | "sibling";
  failures: number;
  seconds: number | string;
  phases: Record<string, number | string>;
  receivers: number;
  members: MemberTransfer[];
}

/** An attempt at a publication failed, or a replica failed in it. The replicas at fault are taken out. */
export interface PublicationFailed {
  kind: "publication.failed";
  version: number;
  epoch: number;
  attempt: number;
  source: "trainer" | "sibling";
  phase: "prepare" | "transfer" | "verify" | "commit";
  culprits: string[];
}

/** Autoscaling wants another number of replicas. */
export interface ReplicasScaled {
  kind: "replicas.scaled";
  pool: string;
  before: number;
  wanted: number;
  reason: ScalingReason;
  ready: number;
  trainer_waits: number;
  replicas_busy: number;
}

/** The job's report could not be written. */
export interface ReportFailed {
  kind: "report.failed";
}

/** One trajectory as people look at it: the prompt, the answer and its reward. */
export interface SampleView {
  step: number;
  prompt_id: string;
  purpose: string;
  prompt: string;
  question: string;
  answer: string;
  ground_truth: unknown;
  reward: number | null;
  reward_failure: string | null;
  stop_reason: string;
  tokens: number;
  versions: number[];
  member: string;
  sampled_tokens: number | null;
  episode: number;
  turns: TurnView[];
  data_source: string;
  details: Record<string, unknown>;
  record: string;
  metadata: Record<string, unknown>;
  advantage: number | null;
  images: ImageView[];
  image_mark: string;
}

/** Why another number of replicas is wanted. */
export type ScalingReason = "trainer_waits" | "replicas_idle" | "no_gain" | "work" | "no_work" | "budget" | "limits";

/** Curves of step metrics. A point stands for one step, or for several steps in a row. */
export interface SeriesView {
  steps: number[];
  time_s: number[];
  tokens: number[];
  metrics: Record<string, BandView>;
}

/** What a service does in a span: SpanKind of proto/millrace/v1/spans.proto. */
export type SpanKind = "start" | "submit" | "job_queue" | "configure" | "step" | "issue" | "admit" | "train" | "fetch" | "assess" | "update" | "report" | "mark" | "evaluate" | "checkpoint" | "track" | "publish" | "prepare" | "transfer" | "verify" | "commit" | "pause" | "group" | "queue" | "lease" | "render" | "engine_queue" | "generate" | "environment" | "tool" | "score" | "complete" | "hold";

/** What a service did, from when to when. */
export interface SpanView {
  kind: SpanKind;
  start_s: number;
  end_s: number;
  step: number | null;
  group: string;
  detail: string;
  attributes: Record<string, number>;
  trace_id: string;
  span_id: string;
  parent_id: string;
}

/** A job spec, and the part of it that differs from the defaults. */
export interface SpecView {
  spec: Record<string, unknown>;
  given: Record<string, unknown>;
}

/** A step was trained. */
export interface StepDone {
  kind: "step.done";
  step: number;
  reward: number | string;
  seconds: number | string;
}

/** One row of a job's step metrics: every metric that one step has. docs/metrics.md declares them. */
export interface StepMetrics {
  step: number;
  time_s: number;
  values: Record<string, number | string>;
}

/** What all services did for a job during some of its steps. */
export interface TimelineView {
  job_id: string;
  from_step: number;
  to_step: number;
  start_s: number;
  end_s: number;
  lanes: LaneView[];
  dropped_spans: number;
  kept_from_step: number;
}

/** The tokens of one trajectory: the prompt's, then those of the response, sampled and given. */
export interface TokensView {
  prompt_tokens: number;
  ids: number[];
  texts: string[] | null;
  logprobs: (number | string | null)[];
  versions: (number | null)[];
  trainer_logprobs: (number | string | null)[];
  advantages: (number | string | null)[];
}

/** An experiment tracker failed or did not answer. */
export interface TrackerFailed {
  kind: "tracker.failed";
  tracker: string;
}

/** The trainer has loaded the model or a checkpoint. */
export interface TrainerConfigured {
  kind: "trainer.configured";
  member: string;
  version: number;
  warnings: string[];
  whole_steps: string;
  stood_by: boolean;
}

/** The trainer begins to load the model or a checkpoint. */
export interface TrainerConfiguring {
  kind: "trainer.configuring";
  member: string;
}

/** The trainer was drained or stopped. The job waits for a trainer and continues. */
export interface TrainerLeft {
  kind: "trainer.left";
  member: string;
  step: number;
}

/** The trainer died or does not answer. The job waits for a trainer and continues. */
export interface TrainerLost {
  kind: "trainer.lost";
  step: number;
  setbacks: number;
}

/** A rank of the trainer had no memory left. The step is made again with a smaller token budget, which the job keeps (`trainer.on_out_of_memory: halve_budget`). */
export interface TrainerOutOfMemory {
  kind: "trainer.out_of_memory";
  step: number;
  token_budget_before: number;
  token_budget: number;
}

/** Training goes wrong for several steps. Told once for each time that the trouble begins. */
export interface TrainingWarning {
  kind: "training.warning";
  cause: WarningCause;
  metric: string;
  value: number | string;
  limit: number | string;
  steps: number;
}

/** One answer of the policy within a response, and what it was given before. */
export interface TurnView {
  given: string;
  given_tokens: number;
  answer: string;
  sampled_tokens: number;
  reward: number;
  stop_reason: string;
  versions: number[];
}

/** The unit of a metric. */
export type Unit = "bytes" | "°C" | "count" | "GiB" | "learning rate" | "loss" | "ms" | "nats" | "norm" | "perplexity" | "probability" | "ratio" | "any" | "reward" | "reward²" | "s" | "share" | "step" | "tokens" | "tokens/s" | "versions" | "W";

/** Whether a job spec can be submitted. */
export interface ValidationView {
  valid: boolean;
  spec: SpecView | null;
  mistakes: Mistake[];
  detail: string;
  fix: string;
  advice: Mistake[];
}

/** What a job waits for. */
export type WaitingFor = "earlier_job" | "quota" | "trainer" | "trainer_loading" | "replica" | "pool" | "replicas_preparing" | "replicas_refused" | "replicas_failed" | "judge" | "resume";

export interface WaitingView {
  reason: WaitingFor;
  message: string;
}

/** What is likely wrong with the training of a job. */
export type WarningCause = "equal_rewards" | "no_signal" | "logprob_mismatch" | "responses_cut" | "reward_failures";

export interface WarningView {
  cause: WarningCause;
  step: number;
  message: string;
  over: boolean;
}

/** A message of a webhook of the job was not delivered in any attempt. */
export interface WebhookFailed {
  kind: "webhook.failed";
  webhook: string;
  message: string;
}
