-- claim: take waiting jobs under a lease.
--
-- KEYS    queues in the order to read them, as pairs: `:front` stream, stream
-- ARGV[3] worker, ARGV[4] lease ms, ARGV[5] most jobs, ARGV[6] result TTL ms, ARGV[7] log TTL ms,
-- ARGV[8] and on: most jobs of each pair
-- Returns {now, next due time (-1: none), streams whose group was gone, last entry id of each KEY, jobs};
--         a job is {id, attempt, request, offset, failures, priority, deadline, submitted, stream,
--         entry, log}. `log` holds the payloads of earlier attempts.
-- If it never runs: nothing was claimed. If its reply is lost: the jobs are this worker's until it
--         releases what it holds and does not know, or its lease ends. It is never repeated blindly.
--
-- Streams are read one by one: XREADGROUP counts per stream. An entry whose job has ended, or is
-- queued elsewhere, is dropped; one whose job runs (the group was lost) goes back to its owner.

local worker, lease, left = ARGV[3], ARGV[4], tonumber(ARGV[5])
local now, jobs, regrouped, drops = now_ms(), {}, 0, 1000

local function promote()
  local due = redis.call('ZRANGEBYSCORE', P .. ':delay', '-inf', now, 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    local job = fields(job_key(id), 'state', 'model', 'priority')
    redis.call('ZREM', P .. ':delay', id)
    if job.state == 'waiting' then enqueue(id, queue_of(job)) end
  end
end

local function read(stream, count)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS', stream, '>')
  if reply and reply.err then
    if not string.find(reply.err, 'NOGROUP', 1, true) then error(reply) end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    regrouped = regrouped + 1
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS', stream, '>')
  end
  return reply and reply[1] and reply[1][2] or {}
end

local function log_of(id)
  local payloads = {}
  for i, entry in ipairs(redis.call('XRANGE', log_key(id), '-', '+')) do payloads[i] = entry[2][2] end
  return payloads
end

-- True when the job is this worker's now.
local function take(stream, entry, id)
  local key = job_key(id)
  local job = fields(key, 'state', 'stream', 'entry', 'owner', 'attempt', 'deadline', 'offset', 'failures',
    'priority', 'submitted', 'request', 'last', 'idem', 'on_disconnect', 'watched')
  local here = job.stream == stream and job.entry == entry
  if here and job.state == 'running' then
    redis.call('XCLAIM', stream, GROUP, job.owner, 0, entry, 'JUSTID')
    return false
  end
  if not here or job.state ~= 'waiting' or not job.request then
    unqueue(stream, entry)
    return false
  end
  if past(job.deadline, now) or abandoned(id, job) then
    unqueue(stream, entry)
    end_job(id, job, past(job.deadline, now) and 'expired' or 'cancelled', now, ARGV[6], ARGV[7])
    return false
  end
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'state', 'running', 'owner', worker, 'claimed', now, 'lease', lease)
  jobs[#jobs + 1] = { id, attempt, job.request, tonumber(job.offset), tonumber(job.failures), job.priority,
    tonumber(job.deadline), tonumber(job.submitted), stream, entry,
    job.offset ~= '0' and log_of(id) or {} }
  return true
end

local function drain(stream, want)
  local got = 0
  while got < want and drops > 0 do
    local entries = read(stream, want - got)
    if #entries == 0 then break end
    for _, entry in ipairs(entries) do
      if take(stream, entry[1], entry[2] and entry[2][2] or '') then got = got + 1 else drops = drops - 1 end
    end
  end
  return got
end

promote()
for i = 1, #KEYS, 2 do
  local want = math.min(left, tonumber(ARGV[8 + (i - 1) / 2]))
  local got = drain(KEYS[i], want)
  got = got + drain(KEYS[i + 1], want - got)
  left = left - got
end

local lasts = {}
if left > 0 then
  for i, stream in ipairs(KEYS) do
    local entry = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
    lasts[i] = entry and entry[1] or '0-0'
  end
end
local next_due = redis.call('ZRANGE', P .. ':delay', 0, 0, 'WITHSCORES')[2]
return { now, next_due and tonumber(next_due) or -1, regrouped, lasts, jobs }
