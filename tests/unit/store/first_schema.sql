-- A state of the first revision, as sqlite_master shows it.
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
CREATE TABLE jobs (
    id TEXT NOT NULL,
    name TEXT NOT NULL,
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
    idle_launches BIGINT NOT NULL,
    failed_starts BIGINT NOT NULL,
    not_before BIGINT,
    budget_set BIGINT,
    rate_low BIGINT,
    disk_gb_seen BIGINT NOT NULL,
    paces TEXT NOT NULL,
    save_time BIGINT,
    stalls BIGINT NOT NULL,
    chain TEXT,
    moves TEXT NOT NULL,
    submitted_by TEXT NOT NULL,
    outputs_attempt BIGINT,
    outputs_sha256 TEXT,
    outputs_bytes BIGINT,
    outputs_problem TEXT,
    totals_ran BIGINT NOT NULL,
    totals_hosts TEXT NOT NULL,
    totals_preemptions BIGINT NOT NULL,
    totals_uncompared BIGINT NOT NULL,
    totals_estimated BIGINT NOT NULL,
    pacing_counted_from BIGINT,
    pacing_ran_before BIGINT NOT NULL,
    pacing_up_since BIGINT,
    pacing_past_up BIGINT NOT NULL,
    pacing_past_runs BIGINT NOT NULL,
    pacing_losses BIGINT NOT NULL,
    pacing_is_slipping BOOLEAN NOT NULL,
    pacing_spot_wanted_since BIGINT,
    array_id TEXT,
    array_name TEXT,
    array_index BIGINT,
    array_count BIGINT,
    array_at_once BIGINT,
    spec TEXT NOT NULL,
    gpu_wanted TEXT NOT NULL,
    CONSTRAINT pk_jobs PRIMARY KEY (id)
);
CREATE INDEX ix_jobs_array_id ON jobs (array_id);
CREATE INDEX ix_jobs_name_submitted_at ON jobs (name, submitted_at);
CREATE INDEX ix_jobs_array_name ON jobs (array_name);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_jobs_submitted_at ON jobs (submitted_at);
CREATE TABLE intents (
    id TEXT NOT NULL,
    kind TEXT NOT NULL,
    provider TEXT NOT NULL,
    "key" TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    tries BIGINT NOT NULL,
    not_before BIGINT,
    accepted_at BIGINT,
    error TEXT NOT NULL,
    account TEXT NOT NULL,
    stray_rate BIGINT NOT NULL,
    stray_since BIGINT,
    attempt_job TEXT,
    attempt_number BIGINT,
    ref_provider TEXT,
    ref_id TEXT,
    ref_scope TEXT,
    CONSTRAINT pk_intents PRIMARY KEY (id)
);
CREATE INDEX ix_intents_state ON intents (state);
CREATE TABLE cooldowns (
    provider TEXT NOT NULL,
    scope TEXT NOT NULL,
    subject TEXT NOT NULL,
    until BIGINT NOT NULL,
    reason TEXT NOT NULL,
    since BIGINT,
    strikes BIGINT NOT NULL,
    ends TEXT NOT NULL,
    CONSTRAINT pk_cooldowns PRIMARY KEY (provider, scope, subject)
);
CREATE INDEX ix_cooldowns_until ON cooldowns (until);
CREATE TABLE experience (
    kind TEXT NOT NULL,
    provider TEXT NOT NULL,
    subject TEXT NOT NULL,
    count BIGINT NOT NULL,
    span BIGINT NOT NULL,
    at BIGINT NOT NULL,
    CONSTRAINT pk_experience PRIMARY KEY (kind, provider, subject)
);
CREATE INDEX ix_experience_at ON experience (at);
CREATE TABLE attempt_costs (
    job_id TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    amount BIGINT NOT NULL,
    on_demand BIGINT NOT NULL,
    uncompared BIGINT NOT NULL,
    billed BIGINT NOT NULL,
    disk BIGINT NOT NULL,
    traffic BIGINT NOT NULL,
    fee BIGINT NOT NULL,
    free BIGINT NOT NULL,
    corrected BIGINT NOT NULL,
    CONSTRAINT pk_attempt_costs PRIMARY KEY (job_id, attempt)
);
CREATE TABLE day_costs (
    day DATE NOT NULL,
    provider TEXT NOT NULL,
    amount BIGINT NOT NULL,
    on_demand BIGINT NOT NULL,
    uncompared BIGINT NOT NULL,
    billed BIGINT NOT NULL,
    disk BIGINT NOT NULL,
    traffic BIGINT NOT NULL,
    fee BIGINT NOT NULL,
    free BIGINT NOT NULL,
    corrected BIGINT NOT NULL,
    CONSTRAINT pk_day_costs PRIMARY KEY (day, provider)
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
CREATE INDEX ix_events_kind_job_id ON events (kind, job_id);
CREATE INDEX ix_events_job_id_seq ON events (job_id, seq);
CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'folding') BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TABLE meta (
    "key" TEXT NOT NULL,
    value TEXT NOT NULL,
    CONSTRAINT pk_meta PRIMARY KEY ("key")
);
CREATE TABLE notifications (
    id BIGINT NOT NULL,
    channel TEXT NOT NULL,
    sent_at BIGINT,
    "key" TEXT NOT NULL,
    topic TEXT NOT NULL,
    severity TEXT NOT NULL,
    at BIGINT NOT NULL,
    title TEXT NOT NULL,
    text TEXT NOT NULL,
    job_id TEXT,
    repeat_after BIGINT NOT NULL,
    CONSTRAINT pk_notifications PRIMARY KEY (id)
);
CREATE INDEX ix_notifications_channel ON notifications (channel);
CREATE TABLE attempts (
    job_id TEXT NOT NULL,
    number BIGINT NOT NULL,
    "key" TEXT NOT NULL,
    state TEXT NOT NULL,
    ceiling BIGINT NOT NULL,
    price_max BIGINT NOT NULL,
    intended_at BIGINT NOT NULL,
    outcome_unknown BOOLEAN NOT NULL,
    launched_at BIGINT,
    running_at BIGINT,
    ended_at BIGINT,
    on_demand_settled BIGINT NOT NULL,
    ever_listed BOOLEAN NOT NULL,
    missing_since BIGINT,
    machine TEXT NOT NULL,
    heartbeat_seq BIGINT NOT NULL,
    heartbeat_seen_at BIGINT,
    read_at BIGINT,
    phase TEXT NOT NULL,
    resumed_from TEXT,
    notice_at BIGINT,
    stop TEXT,
    end_reason TEXT,
    end_detail TEXT NOT NULL,
    exit_code BIGINT,
    listed_at BIGINT,
    over_ceiling_at BIGINT,
    start_deadline BIGINT,
    uploaded_bytes BIGINT NOT NULL,
    restored_bytes BIGINT NOT NULL,
    traffic_since BIGINT,
    traffic_spent BIGINT NOT NULL,
    bill_tries BIGINT NOT NULL,
    bill_read BIGINT,
    bill_note TEXT NOT NULL,
    billed BIGINT,
    full_since BIGINT,
    proven_at BIGINT,
    save_every BIGINT,
    account TEXT NOT NULL,
    watch TEXT,
    freshness TEXT,
    bidding TEXT NOT NULL,
    ceiling_set BIGINT,
    over_since BIGINT,
    notices_lapsed BIGINT NOT NULL,
    notice_lapsed_at BIGINT,
    ref_provider TEXT,
    ref_id TEXT,
    ref_scope TEXT,
    meter_settled BIGINT NOT NULL,
    meter_rate BIGINT NOT NULL,
    meter_on_demand_rate BIGINT,
    meter_since BIGINT,
    meter_until BIGINT,
    meter_traffic BIGINT NOT NULL,
    quote TEXT NOT NULL,
    provider TEXT NOT NULL,
    offer_id TEXT NOT NULL,
    gpu TEXT NOT NULL,
    gpu_count BIGINT NOT NULL,
    price_total BIGINT NOT NULL,
    host_id TEXT,
    on_demand_total BIGINT,
    CONSTRAINT pk_attempts PRIMARY KEY (job_id, number),
    CONSTRAINT fk_attempts_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE UNIQUE INDEX ix_attempts_one_counting ON attempts (job_id) WHERE state IN ('intended', 'starting', 'running', 'stopping');
CREATE INDEX ix_attempts_state ON attempts (state);
CREATE UNIQUE INDEX ix_attempts_key ON attempts ("key");
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
    pinned BOOLEAN NOT NULL,
    host TEXT NOT NULL,
    proven_by BIGINT,
    doubted_by TEXT NOT NULL,
    worked BIGINT,
    CONSTRAINT pk_checkpoints PRIMARY KEY (job_id, ordinal),
    CONSTRAINT fk_checkpoints_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE charges (
    job_id TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    start BIGINT NOT NULL,
    provider TEXT NOT NULL,
    day DATE NOT NULL,
    "end" BIGINT NOT NULL,
    amount BIGINT NOT NULL,
    on_demand BIGINT,
    part TEXT NOT NULL,
    fee BIGINT NOT NULL,
    CONSTRAINT pk_charges PRIMARY KEY (job_id, attempt, start),
    CONSTRAINT fk_charges_job_id_attempts FOREIGN KEY(job_id, attempt) REFERENCES attempts (job_id, number)
);
CREATE INDEX ix_charges_day ON charges (day);
CREATE TRIGGER charges_no_update BEFORE UPDATE ON charges BEGIN SELECT RAISE(ABORT, 'charges are append-only'); END;
CREATE TRIGGER charges_no_delete BEFORE DELETE ON charges BEGIN SELECT RAISE(ABORT, 'charges are append-only'); END;
INSERT INTO alembic_version (version_num) VALUES ('0015');
