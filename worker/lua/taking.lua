-- Stands in front of `claim` and `swap`: how a worker comes to hold jobs.
--
-- Both set `worker`, `lease`, the TTLs and `now` in `taker` before they call `serve`.
--
-- Streams are read one by one: XREADGROUP counts per stream. An entry whose job has ended, or is
-- queued elsewhere, is dropped; one whose job runs (the group was lost) goes back to its owner.

local taker = { regrouped = 0, drops = 1000, jobs = {}, foreign = {} }

-- Moves jobs that have come due to their queues. Returns when the next one comes due; -1: none waits.
local function promote()
  local due = redis.call('ZRANGEBYSCORE', P .. ':delay', '-inf', taker.now, 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    local job = fields(job_key(id), 'state', 'model', 'priority', 'tenant', 'submitted')
    redis.call('ZREM', P .. ':delay', id)
    if job.state == 'waiting' then place(id, job, false, taker.now) end
  end
  return tonumber(redis.call('ZRANGE', P .. ':delay', 0, 0, 'WITHSCORES')[2] or -1)
end

local function promote_due()
  local function kinds() return { P .. ':delay', 'zset' } end
  return guarded(taker.foreign, kinds, promote) or -1
end

local function read(stream, count)
  local command = { 'XREADGROUP', 'GROUP', GROUP, taker.worker, 'COUNT', count, 'STREAMS', stream, '>' }
  local reply = redis.pcall(unpack(command))
  if reply and reply.err then
    if not string.find(reply.err, 'NOGROUP', 1, true) then error(reply) end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    taker.regrouped = taker.regrouped + 1
    reply = redis.call(unpack(command))
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
  local key, now = job_key(id), taker.now
  local job = fields(key, 'state', 'stream', 'entry', 'owner', 'attempt', 'deadline', 'offset', 'failures',
    'priority', 'submitted', 'request', 'last', 'idem', 'on_disconnect', 'watched', 'alone', 'preempted', 'model',
    'tenant')
  local here = job.stream == stream and job.entry == entry
  if here and job.state == 'running' then
    redis.call('XCLAIM', stream, GROUP, job.owner, 0, entry, 'JUSTID')
    return false
  end
  if not here or job.state ~= 'waiting' or not job.request then
    unqueue(stream, entry)
    return false
  end
  if not is_job_id(id) then -- whoever claimed it could name none of its keys
    unqueue(stream, entry)
    end_job(id, job, 'failed', now, taker.result_ttl, taker.log_ttl, 'undecodable',
      'job id: must be <uuid7>.<p>, and of the partition that it lies in')
    return false
  end
  if past(job.deadline, now) or forsaken(id, job, now) then
    unqueue(stream, entry)
    end_job(id, job, past(job.deadline, now) and 'expired' or 'cancelled', now, taker.result_ttl, taker.log_ttl)
    return false
  end
  if not has_room(job.tenant, 'running') then -- it was queued before its tenant had limits
    unqueue(stream, entry)
    if string.sub(stream, -6) ~= ':front' then -- it stands where its entry stood
      local ms, number = string.match(entry, '(%d+)-(%d+)')
      job.submitted = tonumber(ms) + math.min(tonumber(number), 1023) / 1024
    end
    place(id, job, true, now)
    return false
  end
  local logged = job.offset ~= '0' and log_of(id) or {}
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'state', 'running', 'owner', taker.worker, 'claimed', now, 'lease', taker.lease)
  account(id, job.tenant, 'running')
  taker.jobs[#taker.jobs + 1] = { id, attempt, job.request, tonumber(job.offset), tonumber(job.failures),
    job.priority, tonumber(job.deadline), tonumber(job.submitted), stream, entry,
    logged, tonumber(job.preempted or 0) }
  return true
end

local function drain(stream, want)
  local got = 0
  while got < want and taker.drops > 0 do
    local entries = read(stream, want - got)
    if #entries == 0 then break end
    for _, entry in ipairs(entries) do
      local id = entry[2] and entry[2][2] or ''
      local function kinds() return { job_key(id), 'hash', log_key(id), 'stream' } end
      local taken = guarded(taker.foreign, kinds, take, stream, entry[1], id)
      if taken == nil then unqueue(stream, entry[1]) end
      if taken then got = got + 1 else taker.drops = taker.drops - 1 end
    end
  end
  return got
end

-- One turn of whoever is first in line: a tenant's oldest job goes to the front, and is taken there.
-- The queue itself, with the jobs of all tenants without limits, takes turns as one of them. A tenant
-- that has nothing more leaves the line; one at its limit is parked until a job of it has ended.
local function turn(class, front, queue)
  local turns = P .. ':turns:' .. class
  line_up(class, '*')
  local tenant = redis.call('ZPOPMIN', turns)[1]
  if tenant == '*' then
    return redis.call('ZCARD', turns) > 0 and drain(queue, 1) or 0
  end
  local backlog = tenant_key(tenant, 'q:' .. class)
  if not has_room(tenant, 'running') then
    redis.call('SADD', tenant_key(tenant, 'parked'), class)
    return 0
  end
  local id = redis.call('ZPOPMIN', backlog)[1]
  if redis.call('EXISTS', backlog) == 1 then
    line_up(class, tenant)
  else
    redis.call('SREM', P .. ':backlogs:' .. class, tenant)
  end
  local job = id and fields(job_key(id), 'state', 'stream') or {}
  if job.state ~= 'waiting' or job.stream ~= backlog then return 0 end
  enqueue(id, front)
  return drain(front, 1)
end

local function serve_class(front, queue, want)
  local class = class_of(queue)
  if want <= 0 or redis.call('SISMEMBER', P .. ':paused', class) == 1 then return end
  local got = drain(front, want)
  while got < want and taker.drops > 0 and redis.call('EXISTS', P .. ':turns:' .. class) == 1 do
    got = got + turn(class, front, queue)
  end
  drain(queue, want - got)
end

-- What lies where for one class, and for all of them.
local function kinds_of(front, queue)
  local class = class_of(queue)
  return function()
    return { queue, 'stream', front, 'stream', P .. ':turns:' .. class, 'zset', P .. ':backlogs:' .. class, 'set',
      P .. ':paused', 'set', P .. ':limits', 'hash', P .. ':deadline', 'zset',
      P .. ':live:' .. string.match(class, '^(.*):[^:]*$'), 'zset' }
  end
end

-- Takes up to `want` jobs of one class; returns how many. Where a key of the class is not ours, the
-- other classes are served all the same.
local function serve(front, queue, want)
  local before = #taker.jobs
  guarded(taker.foreign, kinds_of(front, queue), serve_class, front, queue, want)
  return #taker.jobs - before
end

-- The last entry of each stream: what a worker that found too little waits behind; '' for one that
-- is not ours. None when it gave up before the ends of them: there is more to look at now.
local function last_entries(streams)
  local lasts = {}
  if taker.drops <= 0 then return lasts end
  for i, stream in ipairs(streams) do
    local found = unless_foreign(redis.pcall('XREVRANGE', stream, '+', '-', 'COUNT', 1))
    lasts[i] = not found and '' or found[1] and found[1][1] or '0-0'
  end
  return lasts
end
