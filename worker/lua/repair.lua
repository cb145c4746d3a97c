-- repair: give back their queue entry to jobs that lost it with a stream.
--
-- KEYS[1] live jobs of the model
-- ARGV[3] first rank to look at, ARGV[4] how many
-- Returns {next rank (0: the walk is over), jobs put back}.
-- If it never runs: such a job waits for ever; nothing else depends on it.
--
-- The live jobs are walked in slices. A waiting job without an entry goes to the front of its class. A running
-- one gets an entry that the next claim hands to its owner: its lease goes on, or ends. On the way the
-- jobs of tenants with limits are counted, which matters to those that were there before the limits. One
-- with a key that is not ours is passed over: claims say which.

local first, count, put_back, now = tonumber(ARGV[3]), tonumber(ARGV[4]), 0, now_ms()

local function look(id)
  local job = fields(job_key(id), 'state', 'stream', 'entry', 'due', 'model', 'priority', 'tenant', 'submitted')
  if not job.state then
    redis.call('ZREM', KEYS[1], id)
    return true
  end
  account(id, job.tenant, job.state)
  if job.state == 'waiting' and job.due then
    redis.call('ZADD', P .. ':delay', 'NX', job.due, id)
  elseif job.state == 'waiting' and (not job.stream or not queued(id, job)) then
    place(id, job, true, now)
    put_back = put_back + 1
  elseif job.state == 'waiting' and is_backlog(job.stream) then
    take_turns(job.tenant, job.model .. ':' .. job.priority)
  elseif job.state == 'running' and not queued(id, job) then
    local stream, entry = enter(id, job.stream)
    redis.call('HSET', job_key(id), 'stream', stream, 'entry', entry)
    put_back = put_back + 1
  end
  return false
end

local ids = redis.call('ZRANGE', KEYS[1], first, first + count - 1)
local gone = 0
for _, id in ipairs(ids) do
  if guarded({}, function() return { job_key(id), 'hash' } end, look, id) then gone = gone + 1 end
end
return { #ids < count and 0 or first + count - gone, put_back }
