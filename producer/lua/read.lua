-- read: a job's state, and its event log after a cursor.
--
-- KEYS[1] job hash, KEYS[2] event log
-- ARGV[3] id, ARGV[4] cursor (an entry id; what lies behind it is returned), ARGV[5] most entries
--         (0: none), ARGV[6] 1: a subscriber asks, and has subscribed,
-- ARGV[7] result TTL ms, ARGV[8] log TTL ms, ARGV[9] 1: tell whether a worker serves the model
-- Returns {hash fields (flat), entries, served, log exists, paused}. paused is told with served. The fields are empty when the job is not there.
-- A waiting job past its deadline is ended here too, so that it ends with no worker up.
-- If it never runs: nothing changed.

local id = ARGV[3]
local now = now_ms()
local names = { 'state', 'attempt', 'owner', 'offset', 'failures', 'model', 'priority', 'submitted', 'due',
  'deadline', 'ended', 'cancel', 'error_code', 'error_message', 'on_disconnect', 'last', 'idem', 'stream',
  'entry', 'watched', 'tenant' }
local job = fields(KEYS[1], unpack(names))

if job.state == 'waiting' and past(job.deadline, now) then
  end_job(id, job, 'expired', now, ARGV[7], ARGV[8])
  job = fields(KEYS[1], unpack(names))
end
if ARGV[6] == '1' and job.on_disconnect == 'cancel' and not job.watched then
  redis.call('HSET', KEYS[1], 'watched', 1)
end

local entries = {}
if ARGV[5] ~= '0' then
  for i, entry in ipairs(redis.call('XRANGE', KEYS[2], '(' .. ARGV[4], '+', 'COUNT', ARGV[5])) do
    entries[i] = { entry[1], entry[2][2] }
  end
end

local served, paused = 0, 0
if ARGV[9] == '1' and job.model then
  paused = redis.call('SISMEMBER', P .. ':paused', job.model .. ':' .. job.priority)
  for _, worker in ipairs(redis.call('ZRANGE', P .. ':workers', 0, -1)) do
    if redis.call('HGET', P .. ':worker:' .. worker, 'model') == job.model then served = 1 end
  end
end

local flat = {}
for name, value in pairs(job) do flat[#flat + 1] = name; flat[#flat + 1] = value end
return { flat, entries, served, redis.call('EXISTS', KEYS[2]), paused }
