-- renew: extend the leases of a worker's jobs.
--
-- KEYS    per job: job hash
-- ARGV[3] worker, then per job: id, attempt
-- Returns per job a sum: 1 lost (another attempt, or ended), 4 cancel was asked for, 8 deadline passed.
-- If it never runs: the leases run out, and the jobs go on elsewhere.
--
-- The attempt is checked before XCLAIM: a bare XCLAIM as heartbeat would steal from a new owner.
-- A cancel that was asked for is announced again on the control channel: the first announcement may
-- have been lost. An entry that is gone (stream or group lost) is put back, still this worker's.

local worker, now, codes = ARGV[3], now_ms(), {}

local function claim_entry(job, ...)
  return redis.pcall('XCLAIM', job.stream, GROUP, worker, 0, job.entry, 'JUSTID', ...)
end

local function hold(key, id, job)
  local reply = claim_entry(job)
  if not reply.err and #reply > 0 and queued(id, job) then return end
  if not queued(id, job) then
    job.stream, job.entry = enter(id, job.stream)
    redis.call('HSET', key, 'stream', job.stream, 'entry', job.entry)
  end
  if claim_entry(job, 'FORCE').err then
    redis.call('XGROUP', 'CREATE', job.stream, GROUP, '0', 'MKSTREAM')
    claim_entry(job, 'FORCE')
  end
end

for k, key in ipairs(KEYS) do
  local id, attempt = ARGV[2 * k + 2], ARGV[2 * k + 3]
  local job = fields(key, 'state', 'attempt', 'stream', 'entry', 'cancel', 'deadline', 'on_disconnect', 'watched',
    'alone')
  if job.state ~= 'running' or job.attempt ~= attempt then
    codes[k] = 1
  else
    guarded({}, function() return { job.stream, 'stream' } end, hold, key, id, job)
    if not job.cancel and forsaken(id, job, now) then
      redis.call('HSET', key, 'cancel', 1)
      job.cancel = '1'
    end
    if job.cancel then
      announce(P .. ':ctl:' .. worker, 'cancel ' .. id .. ' ' .. attempt)
    end
    codes[k] = (job.cancel and 4 or 0) + (past(job.deadline, now) and 8 or 0)
  end
end
return codes
