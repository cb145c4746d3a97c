-- reclaim: move on the jobs whose lease has ended, and end the waiting ones whose deadline has passed.
--
-- KEYS    queue streams (`:front` ones too)
-- ARGV[3] shortest lease ms to look for, ARGV[4] most jobs, ARGV[5] failures allowed where the job
--         does not say, ARGV[6] result TTL ms, ARGV[7] log TTL ms
-- Returns how many jobs were moved on (back to the front, failed, cancelled or expired).
-- If it never runs: jobs of dead workers stay 'running'. Every worker runs it; of many at once the
--         first moves a job, the others find it moved.
--
-- The lease clock is the idle time of the entry in the group; how long the lease is says the hash.

local now, limit, moved = now_ms(), tonumber(ARGV[4]), 0
local names = { 'state', 'stream', 'entry', 'lease', 'model', 'priority', 'cancel', 'deadline', 'offset', 'last',
  'idem', 'failures', 'mark', 'max_failures', 'attempt', 'owner', 'tenant', 'submitted' }

local function move_on(id, job)
  moved = moved + 1
  unqueue(job.stream, job.entry)
  local failures = count_failure(id, job)
  local wanted = not job.cancel and not past(job.deadline, now)
  if wanted and failures > (tonumber(job.max_failures) or tonumber(ARGV[5])) then
    end_job(id, job, 'failed', now, ARGV[6], ARGV[7], 'worker_died',
      'its lease ended, failure ' .. failures .. ' in a row; the worker was ' .. job.owner)
    bury(id, now)
  else
    put_back(id, job, now, ARGV[6], ARGV[7])
  end
end

local function examine(stream, pending)
  local entry, idle = pending[1], pending[3]
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  local id = found and found[2][2] or ''
  local job = fields(job_key(id), unpack(names))
  if job.state ~= 'running' or job.stream ~= stream or job.entry ~= entry then
    unqueue(stream, entry)
  elseif idle >= tonumber(job.lease) then
    move_on(id, job)
  end
end

local function scan(stream)
  local from = '-'
  while moved < limit do
    local page = redis.pcall('XPENDING', stream, GROUP, 'IDLE', ARGV[3], from, '+', 100)
    if page.err or #page == 0 then return end
    for _, pending in ipairs(page) do
      if moved < limit then examine(stream, pending) end
      from = '(' .. pending[1]
    end
  end
end

-- The names of workers that died are forgotten an hour after their last job moved on.
local function forget_consumers(stream)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, GROUP)
  if consumers.err then return end
  for _, consumer in ipairs(consumers) do
    local found = {}
    for i = 1, #consumer, 2 do found[consumer[i]] = consumer[i + 1] end
    if found.pending == 0 and found.idle > 3600 * 1000 then
      redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, found.name)
    end
  end
end

for _, stream in ipairs(KEYS) do -- one that is not ours keeps nobody from the others; claims say which
  guarded({}, function() return { stream, 'stream' } end, scan, stream)
  forget_consumers(stream)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':deadline', '-inf', now, 'LIMIT', 0, limit)) do
  local job = fields(job_key(id), unpack(names))
  if job.state == 'waiting' then
    end_job(id, job, 'expired', now, ARGV[6], ARGV[7])
    moved = moved + 1
  else
    -- the worker of a running job is told by emit and renew; its lease covers the rest
    redis.call('ZREM', P .. ':deadline', id)
  end
end
redis.call('ZREMRANGEBYSCORE', P .. ':dead', '-inf', now - DEAD_TTL_MS)
return moved
