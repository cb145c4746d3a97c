-- cancel: end a waiting job now, or ask the worker of a running one to end it.
--
-- KEYS[1] job hash, KEYS[2] event log
-- ARGV[3] id, ARGV[4] result TTL ms, ARGV[5] log TTL ms,
-- ARGV[6] 1: only a job with on_disconnect=cancel that nobody listens to any more
-- Returns the state after the call, or '' when the job is not there. 'running' means asked: the
--         worker hears it on its control channel, and again in the reply to its next emit or renew.
-- If it never runs: the job goes on. Repeating it changes nothing.

local id = ARGV[3]
local job = fields(KEYS[1], 'state', 'attempt', 'owner', 'offset', 'last', 'idem', 'stream', 'entry',
  'on_disconnect', 'watched', 'model', 'tenant')
if not job.state then return '' end
if ARGV[6] == '1' and not abandoned(id, job) then return job.state end
if job.state == 'waiting' then
  -- the queue entry stays: deleting one that was not delivered spoils the group's lag for good;
  -- whoever reads it finds the job ended and drops it
  end_job(id, job, 'cancelled', now_ms(), ARGV[4], ARGV[5])
  return 'cancelled'
end
if job.state == 'running' then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  announce(P .. ':ctl:' .. job.owner, 'cancel ' .. id .. ' ' .. job.attempt)
end
return job.state
