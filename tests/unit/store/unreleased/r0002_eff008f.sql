-- A state as commit eff008f made it, before the first release.
CREATE TABLE jobs (
    id TEXT NOT NULL, 
    name TEXT NOT NULL, 
    spec TEXT NOT NULL, 
    gpu_wanted TEXT NOT NULL, 
    code_sha256 TEXT, 
    code_bytes BIGINT NOT NULL, 
    submitted_at BIGINT NOT NULL, 
    state TEXT NOT NULL, 
    reason TEXT NOT NULL, 
    state_since BIGINT NOT NULL, 
    attempts_made BIGINT NOT NULL, 
    errors BIGINT NOT NULL, 
    image_errors BIGINT NOT NULL, 
    recoveries BIGINT NOT NULL, 
    spent BIGINT NOT NULL, 
    on_demand BIGINT NOT NULL, 
    lost BIGINT NOT NULL, 
    started_at BIGINT, 
    ended_at BIGINT, 
    exit_code BIGINT, 
    cancel_requested BOOLEAN NOT NULL, 
    CONSTRAINT pk_jobs PRIMARY KEY (id)
);
CREATE TABLE intents (
    id TEXT NOT NULL, 
    kind TEXT NOT NULL, 
    provider TEXT NOT NULL, 
    "key" TEXT NOT NULL, 
    state TEXT NOT NULL, 
    created_at BIGINT NOT NULL, 
    attempt_job TEXT, 
    attempt_number BIGINT, 
    ref_provider TEXT, 
    ref_id TEXT, 
    ref_scope TEXT, 
    tries BIGINT NOT NULL, 
    not_before BIGINT, 
    accepted_at BIGINT, 
    error TEXT NOT NULL, 
    CONSTRAINT pk_intents PRIMARY KEY (id)
);
CREATE TABLE cooldowns (
    provider TEXT NOT NULL, 
    scope TEXT NOT NULL, 
    subject TEXT NOT NULL, 
    until BIGINT NOT NULL, 
    reason TEXT NOT NULL, 
    CONSTRAINT pk_cooldowns PRIMARY KEY (provider, scope, subject)
);
CREATE TABLE events (
    seq INTEGER NOT NULL, 
    at BIGINT NOT NULL, 
    kind TEXT NOT NULL, 
    message TEXT NOT NULL, 
    job_id TEXT, 
    attempt BIGINT, 
    data TEXT NOT NULL, 
    CONSTRAINT pk_events PRIMARY KEY (seq)
);
CREATE TABLE meta (
    "key" TEXT NOT NULL, 
    value TEXT NOT NULL, 
    CONSTRAINT pk_meta PRIMARY KEY ("key")
);
CREATE TABLE attempts (
    job_id TEXT NOT NULL, 
    number BIGINT NOT NULL, 
    "key" TEXT NOT NULL, 
    state TEXT NOT NULL, 
    quote TEXT NOT NULL, 
    provider TEXT NOT NULL, 
    offer_id TEXT NOT NULL, 
    host_id TEXT, 
    region TEXT NOT NULL, 
    gpu TEXT NOT NULL, 
    gpu_count BIGINT NOT NULL, 
    price_total BIGINT NOT NULL, 
    price_per_gpu BIGINT NOT NULL, 
    ceiling BIGINT NOT NULL, 
    price_max BIGINT NOT NULL, 
    intended_at BIGINT NOT NULL, 
    ref_id TEXT, 
    ref_scope TEXT, 
    outcome_unknown BOOLEAN NOT NULL, 
    launched_at BIGINT, 
    running_at BIGINT, 
    ended_at BIGINT, 
    meter_settled BIGINT NOT NULL, 
    meter_rate BIGINT NOT NULL, 
    meter_on_demand_rate BIGINT, 
    meter_since BIGINT, 
    on_demand_settled BIGINT NOT NULL, 
    ever_listed BOOLEAN NOT NULL, 
    missing_since BIGINT, 
    machine TEXT NOT NULL, 
    heartbeat_seq BIGINT NOT NULL, 
    heartbeat_seen_at BIGINT, 
    looked_at BIGINT, 
    phase TEXT NOT NULL, 
    resumed_from TEXT, 
    notice_at BIGINT, 
    stop TEXT, 
    end_reason TEXT, 
    end_detail TEXT NOT NULL, 
    exit_code BIGINT, 
    CONSTRAINT pk_attempts PRIMARY KEY (job_id, number), 
    CONSTRAINT fk_attempts_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE checkpoints (
    job_id TEXT NOT NULL, 
    ordinal BIGINT NOT NULL, 
    name TEXT NOT NULL, 
    attempt BIGINT NOT NULL, 
    step BIGINT, 
    bytes BIGINT NOT NULL, 
    at BIGINT NOT NULL, 
    manifest_key TEXT NOT NULL, 
    sha256 TEXT NOT NULL, 
    metric FLOAT, 
    pinned BOOLEAN DEFAULT 0 NOT NULL, 
    CONSTRAINT pk_checkpoints PRIMARY KEY (job_id, ordinal), 
    CONSTRAINT fk_checkpoints_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE charges (
    job_id TEXT NOT NULL, 
    attempt BIGINT NOT NULL, 
    start BIGINT NOT NULL, 
    "end" BIGINT NOT NULL, 
    provider TEXT NOT NULL, 
    day DATE NOT NULL, 
    amount BIGINT NOT NULL, 
    on_demand BIGINT, 
    CONSTRAINT pk_charges PRIMARY KEY (job_id, attempt, start), 
    CONSTRAINT fk_charges_job_id_attempts FOREIGN KEY(job_id, attempt) REFERENCES attempts (job_id, number)
);
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_jobs_name_submitted_at ON jobs (name, submitted_at);
CREATE INDEX ix_jobs_submitted_at ON jobs (submitted_at);
CREATE INDEX ix_intents_state ON intents (state);
CREATE INDEX ix_cooldowns_until ON cooldowns (until);
CREATE INDEX ix_events_job_id_seq ON events (job_id, seq);
CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE UNIQUE INDEX ix_attempts_one_counting ON attempts (job_id) WHERE state IN ('intended', 'starting', 'running', 'stopping');
CREATE INDEX ix_attempts_state ON attempts (state);
CREATE UNIQUE INDEX ix_attempts_key ON attempts ("key");
CREATE INDEX ix_charges_day ON charges (day);
CREATE TRIGGER charges_no_update BEFORE UPDATE ON charges BEGIN SELECT RAISE(ABORT, 'charges are append-only'); END;
CREATE TRIGGER charges_no_delete BEFORE DELETE ON charges BEGIN SELECT RAISE(ABORT, 'charges are append-only'); END;
INSERT INTO alembic_version VALUES ('0002');
