-- release: hand jobs back unharmed; they go to the front of their class.
--
-- KEYS    per job: job hash
-- ARGV[3] result TTL ms, ARGV[4] log TTL ms, ARGV[5] 1: it made way for a more urgent job (counted),
-- then per job: id, attempt
-- Returns per job 1 released (or ended, as cancel or the deadline asked), 0 not this attempt's any more.
-- If it never runs: the leases run out. Releasing costs the job neither a failure nor a token.

local now, replies = now_ms(), {}

for k, key in ipairs(KEYS) do
  local id, attempt = ARGV[4 + 2 * k], ARGV[5 + 2 * k]
  local job = fields(key, 'state', 'attempt', 'stream', 'entry', 'model', 'priority', 'cancel', 'deadline',
    'offset', 'last', 'idem', 'tenant', 'submitted')
  local mine = job.state == 'running' and job.attempt == attempt
  if mine then
    unqueue(job.stream, job.entry)
    if ARGV[5] == '1' then redis.call('HINCRBY', key, 'preempted', 1) end
    put_back(id, job, now, ARGV[3], ARGV[4])
  end
  replies[k] = mine and 1 or 0
end
return replies
