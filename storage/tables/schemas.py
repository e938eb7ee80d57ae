"""Schemas of the catalog's tables: every column with its type and meaning.

Columns are flat, because filters on struct fields are not pushed down into Lance. Tables are append-only. Times are
naive and in UTC. A column that may be left out of a row is nullable; the others are required.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

_TEXT, _INT, _FLOAT, _BOOL, _TIME = pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us")


def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": description})


def _table(description: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(fields, metadata={"description": description})


_RUN_ID = _field("run_id", _TEXT, "run that wrote this row (runs.run_id)")
_CREATED_AT = _field("created_at", _TIME, "when the row was written, UTC; filled in if left out")

ARTIFACTS = _table(
    "everything that a run reads or makes, by content",
    _field("artifact_id", _TEXT, "kind and first 16 characters of the digest"),
    _field("kind", _TEXT, "what it is: model, prompts, trace_snapshot, policy_set, curve, ..."),
    _field("digest", _TEXT, "sha256 of the content"),
    _field("name", _TEXT, "name for people"),
    _field(
        "uri",
        _TEXT,
        "where the content lies, from the home; a URL elsewhere; empty when the catalog's rows are the content",
    ),
    _field("metadata_json", _TEXT, "further facts as one JSON object"),
    _CREATED_AT,
)

RUNS = _table(
    "one row for each attempt at a stage; a completed row is what publishes the run's results",
    _field("run_id", _TEXT, "id of the run"),
    _field("stage", _TEXT, "collect, train, evaluate, ..."),
    _field("stage_key", _TEXT, "digest of inputs, parameters and code: same key, same result"),
    _field("outcome", _TEXT, "completed, failed, skipped, or repeated: done again only to be compared"),
    _field("reason", _TEXT, "why it failed or was skipped, or which run it repeats; else empty"),
    _field("reused_run_id", _TEXT, "of a skipped run: the completed run whose results stand in; else empty"),
    _field("parameters_json", _TEXT, "parameters as one JSON object"),
    _field("seed", _INT, "seed of the run", nullable=True),
    _field("git_commit", _TEXT, "commit of the project's checkout; empty if it is none"),
    _field("git_dirty", _BOOL, "whether tracked files differed from that commit"),
    _field("environment_id", _TEXT, "artifact that lists packages, interpreter and platform; empty for skipped runs"),
    _field("code_fingerprint", _TEXT, "digest of the sources that the stage ran"),
    _field("hardware", _TEXT, "processor, memory and GPUs"),
    _field("started_at", _TIME, "start, UTC"),
    _field("ended_at", _TIME, "end, UTC"),
    _field("seconds", _FLOAT, "duration on a clock that does not jump"),
    _field("prefect_flow_run_id", _TEXT, "Prefect flow run; empty if none"),
    _field("prefect_task_run_id", _TEXT, "Prefect task run; empty if none"),
    _field("mlflow_run_id", _TEXT, "MLflow run of the stage; empty if none"),
)

EDGES = _table(
    "what each run read and made",
    _RUN_ID,
    _field("artifact_id", _TEXT, "the artifact (artifacts.artifact_id)"),
    _field("role", _TEXT, "input or output"),
    _field("name", _TEXT, "what the artifact is to the run"),
)

SAMPLES = _table(
    "samples that were collected or evaluated",
    _field("sample_id", _TEXT, "id of the sample"),
    _field("benchmark", _TEXT, "benchmark that it belongs to"),
    _field("task", _TEXT, "task of the benchmark"),
    _field("split", _TEXT, "train, validation or test"),
    _field("setting", _TEXT, "query_aware or query_agnostic"),
    _field("seed", _INT, "seed that generated it"),
    _field("prompt_digest", _TEXT, "sha256 of the prompt"),
    _field("context_tokens", _INT, "tokens whose cache entries are ranked"),
    _field("question_tokens", _INT, "tokens of the question"),
    _field("answer_tokens", _INT, "tokens of the reference answer"),
    _field("collection", _TEXT, "collection in the trace store; empty if its traces are not kept"),
    _field("model_digest", _TEXT, "digest of the model that tokenised it"),
    _RUN_ID,
)

HEADS = _table(
    "outcome of training for each KV head, and the shape of its importance on held-out traces",
    _field("policy_set_id", _TEXT, "artifact of the policy set"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("head", _INT, "layer * KV heads per layer + KV head"),
    _field("head_name", _TEXT, "as in L03.H1"),
    _field("layer", _INT, "layer"),
    _field("kv_head", _INT, "KV head within the layer"),
    _field("heldout_cost", _FLOAT, "normalised eviction cost on held-out traces; 1 is optimal"),
    _field("steps", _INT, "training steps"),
    _field("zipf_slope", _FLOAT, "importance falls as rank to minus this; empty where it has no slope", nullable=True),
    _field("effective_tokens", _FLOAT, "exp of the entropy of importance, in tokens", nullable=True),
    _field(
        "rank_deviation",
        _FLOAT,
        "mean squared distance of the head's ranks, from 0 to 1, from the mean over heads",
        nullable=True,
    ),
    _RUN_ID,
)

HEAD_PAIRS = _table(
    "how alike two KV heads rank, by importance on held-out traces; every pair once, and no head with itself",
    _field("policy_set_id", _TEXT, "artifact of the policy set whose held-out traces they are"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("head_a", _INT, "the lower head: layer * KV heads per layer + KV head"),
    _field("head_b", _INT, "the higher head"),
    _field("spearman", _FLOAT, "rank correlation, mean over samples; empty where a head has no order", nullable=True),
    _field("n", _INT, "samples"),
    _RUN_ID,
)

HEAD_COSTS = _table(
    "what each method's ranking costs each KV head on the evaluated samples",
    _field("evaluation_id", _TEXT, "artifact of the evaluation"),
    _field("benchmark", _TEXT, "benchmark"),
    _field("policy_set_id", _TEXT, "artifact of the policy set; empty for heuristics"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("setting", _TEXT, "query_aware or query_agnostic"),
    _field("method", _TEXT, "eviction method"),
    _field("seed", _INT, "seed"),
    _field("head", _INT, "layer * KV heads per layer + KV head"),
    _field("head_name", _TEXT, "as in L03.H1"),
    _field("cost", _FLOAT, "normalised eviction cost, mean over the samples; 1 is optimal"),
    _field("n", _INT, "samples"),
    _RUN_ID,
)

CURVES = _table(
    "budget curves, one row for each point",
    _field("evaluation_id", _TEXT, "artifact of the evaluation"),
    _RUN_ID,
    _field("mlflow_run_id", _TEXT, "MLflow run of the curve"),
    _field("curve_id", _TEXT, "artifact of the curve"),
    _field("model_id", _TEXT, "artifact of the model"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("policy_set_id", _TEXT, "artifact of the policy set; empty for heuristics"),
    _field("method", _TEXT, "eviction method"),
    _field("benchmark", _TEXT, "benchmark"),
    _field("task", _TEXT, 'task; "mean" is the mean over tasks'),
    _field("setting", _TEXT, "query_aware or query_agnostic"),
    _field("metric", _TEXT, "metric"),
    _field("budget", _INT, "entries kept per KV head, in tokens"),
    _field("value", _FLOAT, "mean over the samples"),
    _field("ci_low", _FLOAT, "lower end of the bootstrap interval", nullable=True),
    _field("ci_high", _FLOAT, "upper end of the bootstrap interval", nullable=True),
    _field("n", _INT, "samples"),
    _field("seed", _INT, "seed"),
    _CREATED_AT,
)

COMPARISONS = _table(
    "every method against every other at every budget, mean over tasks; each pair in both orders",
    _field("evaluation_id", _TEXT, "artifact of the evaluation"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("benchmark", _TEXT, "benchmark"),
    _field("setting", _TEXT, "query_aware or query_agnostic"),
    _field("metric", _TEXT, "metric"),
    _field("budget", _INT, "entries kept per KV head, in tokens"),
    _field("method", _TEXT, "the method that is better or worse"),
    _field("other", _TEXT, "the one it is compared with"),
    _field("difference", _FLOAT, "method minus other, paired by sample, seeds averaged"),
    _field("ci_low", _FLOAT, "lower end of the interval over samples and seeds", nullable=True),
    _field("ci_high", _FLOAT, "upper end of the interval over samples and seeds", nullable=True),
    _field("confidence", _FLOAT, "share of the bootstrap resamples in which the method is better; ties count half"),
    _field("verdict", _TEXT, "better or worse where the interval excludes 0 and samples suffice, else undecided"),
    _field("is_contest", _BOOL, "whether both evict and neither knows the future"),
    _field("is_best_baseline", _BOOL, "whether the other is the heuristic with the best mean at this budget"),
    _field("n", _INT, "samples"),
    _field("num_seeds", _INT, "seeds of the method"),
    _field("other_num_seeds", _INT, "seeds of the other"),
    _field("seed_std", _FLOAT, "standard deviation of the method's mean over its seeds", nullable=True),
    _RUN_ID,
)

FINDINGS = _table(
    "what analyses of an evaluation found that is no curve: nested best sets, one token left out",
    _field("evaluation_id", _TEXT, "artifact of the evaluation"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("benchmark", _TEXT, "benchmark"),
    _field("setting", _TEXT, "query_aware or query_agnostic"),
    _field("analysis", _TEXT, "nestedness or leave_one_out"),
    _field("quantity", _TEXT, "overlap, excess_missed_mass or spearman"),
    _field("method", _TEXT, "eviction method"),
    _field("seed", _INT, "seed"),
    _field("budget", _INT, "entries kept per KV head, in tokens", nullable=True),
    _field("larger_budget", _INT, "budget whose cache that was chosen from", nullable=True),
    _field("value", _FLOAT, "mean over the samples"),
    _field("ci_low", _FLOAT, "lower end of the bootstrap interval", nullable=True),
    _field("ci_high", _FLOAT, "upper end of the bootstrap interval", nullable=True),
    _field("n", _INT, "samples"),
    _RUN_ID,
)

SCORES = _table(
    "scores of single samples, for paired comparisons",
    _field("evaluation_id", _TEXT, "artifact of the evaluation"),
    _field("sample_id", _TEXT, "sample"),
    _field("benchmark", _TEXT, "benchmark"),
    _field("task", _TEXT, "task"),
    _field("setting", _TEXT, "query_aware or query_agnostic"),
    _field("method", _TEXT, "eviction method"),
    _field("seed", _INT, "seed"),
    _field("budget", _INT, "entries kept per KV head, in tokens"),
    _field("metric", _TEXT, "metric"),
    _field("value", _FLOAT, "score of the sample"),
    _RUN_ID,
)

PROMOTIONS = _table(
    "every decision on which policy set is the champion of its model, in the order in which they were made",
    _field("model_digest", _TEXT, "digest of the model"),
    _field("kind", _TEXT, "automatic, after an evaluation; manual; or rollback, to the champion before"),
    _field("decision", _TEXT, "promoted, or kept: the champion stays"),
    _field("challenger_id", _TEXT, "artifact of the policy set that was to become champion"),
    _field("champion_before_id", _TEXT, "artifact of the champion until then; empty if there was none"),
    _field("champion_id", _TEXT, "artifact of the champion from then on"),
    _field("evaluation_id", _TEXT, "evaluation of the challenger that was decided on; empty if none was"),
    _field("setting", _TEXT, "setting whose scores were compared; empty if none were"),
    _field("difference", _FLOAT, "challenger minus champion in KL, mean over budgets and tasks", nullable=True),
    _field("ci_low", _FLOAT, "lower end of its interval over samples, paired", nullable=True),
    _field("ci_high", _FLOAT, "upper end of its interval over samples, paired", nullable=True),
    _field("worst_budget", _INT, "budget at which the challenger is worst against the champion", nullable=True),
    _field("worst_change", _FLOAT, "by how much it is worse there, as a share of the champion's KL", nullable=True),
    _field("margin", _FLOAT, "share by which it may be worse at a budget", nullable=True),
    _field("n", _INT, "samples that both were evaluated on", nullable=True),
    _field("reason", _TEXT, "why it was decided so"),
    _RUN_ID,
    _CREATED_AT,
)

MODELS = _table(
    "models that were used",
    _field("model_id", _TEXT, "artifact of the model"),
    _field("name", _TEXT, "name for people"),
    _field("source", _TEXT, "folder, hub id, file or registered version that it was loaded from"),
    _field("revision", _TEXT, "commit, or identity of a registered version; empty if it has none"),
    _field("digest", _TEXT, "digest of weights, configuration and tokenizer"),
    _field("architecture", _TEXT, "architecture"),
    _field("num_layers", _INT, "layers"),
    _field("num_query_heads", _INT, "query heads per layer"),
    _field("num_kv_heads", _INT, "KV heads per layer"),
    _field("head_dim", _INT, "dimension of a head"),
    _field("max_positions", _INT, "longest context, in tokens"),
    _CREATED_AT,
)

WATCHED = _table(
    "what became of the models that watched sources showed, one row whenever that changed",
    _field("source", _TEXT, "the source, such as folder:/models"),
    _field("reference", _TEXT, "the model as a pipeline is given it; the source if that could not be looked at"),
    _field("outcome", _TEXT, "waiting for its files, found, known, unsupported, started or failed"),
    _field("reason", _TEXT, "why; empty for what is found or started"),
    _field("state", _TEXT, "of names, sizes and times of its files, a commit or a version; empty while they change"),
    _field("digest", _TEXT, "of the content: a GGUF file, a folder, a commit or a version; empty while it is not read"),
    _field("model_digest", _TEXT, "digest of the model (models.digest); empty until that was made"),
    _field("flow_run_id", _TEXT, "Prefect flow run of its pipeline; empty if none was started"),
    _CREATED_AT,
)

METRICS = _table(
    "training curves, one row for each point",
    _RUN_ID,
    _field("policy_set_id", _TEXT, "artifact of the policy set"),
    _field("step", _INT, "training step"),
    _field("name", _TEXT, "metric"),
    _field("value", _FLOAT, "value"),
)

HEAD_CURVES = _table(
    "held-out cost of each KV head during training, one row for each point",
    _field("policy_set_id", _TEXT, "artifact of the policy set"),
    _field("model_digest", _TEXT, "digest of the model"),
    _field("head", _INT, "layer * KV heads per layer + KV head"),
    _field("head_name", _TEXT, "as in L03.H1"),
    _field("step", _INT, "training step"),
    _field("heldout_cost", _FLOAT, "normalised eviction cost on held-out traces after that step; 1 is optimal"),
    _RUN_ID,
)

TABLES: Mapping[str, pa.Schema] = {
    "artifacts": ARTIFACTS,
    "runs": RUNS,
    "edges": EDGES,
    "samples": SAMPLES,
    "heads": HEADS,
    "head_pairs": HEAD_PAIRS,
    "head_costs": HEAD_COSTS,
    "head_curves": HEAD_CURVES,
    "curves": CURVES,
    "comparisons": COMPARISONS,
    "findings": FINDINGS,
    "scores": SCORES,
    "promotions": PROMOTIONS,
    "models": MODELS,
    "watched": WATCHED,
    "metrics": METRICS,
}

# What is registered once: the column that names it.
UNIQUE: Mapping[str, str] = {"artifacts": "artifact_id", "models": "model_id"}

# The columns that rows are looked up by.
INDEXED: Mapping[str, tuple[str, ...]] = {
    "artifacts": ("artifact_id",),
    "runs": ("run_id", "stage_key", "mlflow_run_id"),
    "edges": ("run_id", "artifact_id"),
    "samples": ("run_id",),
    "heads": ("run_id",),
    "head_pairs": ("run_id",),
    "head_costs": ("run_id",),
    "head_curves": ("run_id",),
    "curves": ("run_id", "curve_id", "mlflow_run_id"),
    "comparisons": ("run_id",),
    "findings": ("run_id",),
    "scores": ("run_id",),
    "promotions": ("run_id",),
    "metrics": ("run_id",),
}
