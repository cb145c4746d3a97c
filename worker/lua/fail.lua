-- fail: an attempt went wrong while the job was the worker's.
--
-- KEYS[1] job hash, KEYS[2] event log
-- ARGV[3] id, ARGV[4] attempt, ARGV[5] code, ARGV[6] message, ARGV[7] 1: may be tried again,
-- ARGV[8] failures allowed where the job does not say, ARGV[9] result TTL ms, ARGV[10] log TTL ms,
-- ARGV[11] first back-off ms, ARGV[12] longest back-off ms, ARGV[13] random number in 0..1,
-- ARGV[14] 1: dead-letter at once (nobody can read the job)
-- Returns the state after the call, '' when the attempt is not the current one.
-- If it never runs: the lease runs out, which counts as the failure.
--
-- Back-off: full jitter, a random part of first * 2^(failures - 1). It is a due time and no
-- priority: the job waits in `delay`, in nobody's way, and then goes to the end of its queue.

local id, now = ARGV[3], now_ms()
local job = fields(KEYS[1], 'state', 'attempt', 'stream', 'entry', 'model', 'priority', 'cancel', 'deadline',
  'offset', 'last', 'idem', 'failures', 'mark', 'max_failures', 'tenant')
if job.state ~= 'running' or job.attempt ~= ARGV[4] then return '' end

unqueue(job.stream, job.entry)
local failures = count_failure(id, job)
local exhausted = failures > (tonumber(job.max_failures) or tonumber(ARGV[8]))
if job.cancel then
  end_job(id, job, 'cancelled', now, ARGV[9], ARGV[10])
  return 'cancelled'
end
if ARGV[7] ~= '1' or exhausted then
  end_job(id, job, 'failed', now, ARGV[9], ARGV[10], ARGV[5], ARGV[6])
  if ARGV[7] == '1' or ARGV[14] == '1' then bury(id, now) end
  return 'failed'
end
if past(job.deadline, now) then -- nobody else would see it before the back-off is over
  end_job(id, job, 'expired', now, ARGV[9], ARGV[10])
  return 'expired'
end
local bound = math.min(tonumber(ARGV[12]), tonumber(ARGV[11]) * 2 ^ (failures - 1))
local due = now + math.floor(tonumber(ARGV[13]) * bound)
redis.call('HSET', KEYS[1], 'state', 'waiting', 'due', due)
redis.call('HDEL', KEYS[1], 'owner', 'claimed', 'stream', 'entry')
redis.call('ZADD', P .. ':delay', due, id)
redis.call('ZADD', P .. ':live:' .. job.model, due, id)
account(id, job.tenant, 'waiting')
return 'waiting'
