-- finish: a job's last events, its terminal event, its result, its TTLs and its way out of the
-- queue, in one move: there is no "finished, but not acknowledged".
--
-- KEYS[1] job hash, KEYS[2] event log
-- ARGV[3] id, ARGV[4] attempt, ARGV[5] state, ARGV[6] result ('' : none), ARGV[7] error code ('' : none),
-- ARGV[8] error message, ARGV[9] result TTL ms, ARGV[10] log TTL ms, ARGV[11] finish reason of the
-- terminal event, then the events before it, as append_events takes them
-- Returns {1, ''} done (also when an earlier try was), {0, state} fenced: nothing was written,
--         {2, offset} behind, as in emit.
-- If it never runs: the job stays running until its lease ends, and goes on elsewhere.

local id, attempt, state, now = ARGV[3], ARGV[4], ARGV[5], now_ms()
local job = fields(KEYS[1], 'state', 'attempt', 'offset', 'last', 'idem', 'stream', 'entry', 'cancel', 'deadline',
  'finished_by', 'model', 'tenant')
local reason = ARGV[11]
-- an earlier try: the deadline may have passed before it, or since
local asked = job.state == state or (state == 'cancelled' and job.state == 'expired')
if job.finished_by == attempt and asked then return { 1, '' } end
if state == 'cancelled' and not job.cancel and past(job.deadline, now) then
  state, reason = 'expired', 'expired'
end
if job.state ~= 'running' or job.attempt ~= attempt then return { 0, job.state or '' } end

local offset, last = append_events(id, job, ARGV, 12)
if offset == nil then return { 2, job.offset } end
job.offset = offset
last = append(id, last, offset .. '-*', last_event(job, reason, ARGV[7] ~= '' and ARGV[7] or nil, ARGV[8]))
redis.call('HSET', KEYS[1], 'offset', offset, 'last', last, 'finished_by', attempt)
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'result', ARGV[6]) end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'error_code', ARGV[7], 'error_message', ARGV[8]) end
unqueue(job.stream, job.entry)
close(id, job, state, now, ARGV[9], ARGV[10])
return { 1, '' }
