-- swap: give the places of running jobs to more urgent ones that wait. For each job taken one is put
-- back, to the front of its class with its log, so the worker never holds one more than before.
--
-- KEYS    queues of the more urgent classes, most urgent first, as pairs: `:front` stream, stream; then
--         the model's bell
-- ARGV[3] worker, ARGV[4] lease ms, ARGV[5] result TTL ms, ARGV[6] log TTL ms, then per job that may be
--         put back, the first one first: id, attempt
-- Returns {now, streams whose group was gone, last entry id of each KEY, jobs as claim's, ids put back,
--         keys that are not ours as claim's}
-- If it never runs: nothing was changed. If its reply is lost: what it took is found as phantoms, and
--         what it put back is fenced.

taker.worker, taker.lease, taker.now = ARGV[3], ARGV[4], now_ms()
taker.result_ttl, taker.log_ttl = ARGV[5], ARGV[6]

local victims = {}
for i = 7, #ARGV, 2 do
  local job = fields(job_key(ARGV[i]), 'state', 'attempt', 'stream', 'entry', 'model', 'priority', 'cancel',
    'deadline', 'offset', 'last', 'idem', 'tenant', 'submitted')
  if job.state == 'running' and job.attempt == ARGV[i + 1] then victims[#victims + 1] = { ARGV[i], job } end
end

promote_due()
local got = 0
for i = 1, #KEYS - 1, 2 do got = got + serve(KEYS[i], KEYS[i + 1], #victims - got) end
local put = {}
for i = 1, got do
  local id, job = unpack(victims[i])
  unqueue(job.stream, job.entry)
  redis.call('HINCRBY', job_key(id), 'preempted', 1)
  put_back(id, job, taker.now, taker.result_ttl, taker.log_ttl)
  put[i] = id
end
return { taker.now, taker.regrouped, got < #victims and last_entries(KEYS) or {}, taker.jobs, put,
  taker.foreign }
