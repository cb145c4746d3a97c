-- claim: take waiting jobs under a lease.
--
-- KEYS    queues in the order to read them, as pairs: `:front` stream, stream; then the model's bell
-- ARGV[3] worker, ARGV[4] lease ms, ARGV[5] most jobs, ARGV[6] result TTL ms, ARGV[7] log TTL ms,
-- ARGV[8] ticket of a claim that waited at the server ('': it did not), ARGV[9] and on: most jobs of each pair
-- Returns {now, next due time (-1: none), streams whose group was gone, last entry id of each KEY, jobs,
--         keys that are not ours: {key, type that lies there, type that belongs there}};
--         a job is {id, attempt, request, offset, failures, priority, deadline, submitted, stream,
--         entry, log, preempted}. `log` holds the payloads of earlier attempts.
--         Nil, and nothing is taken, where there is a ticket and `standing:<worker>` does not hold it; it is used up.
-- If it never runs: nothing was claimed. If its reply is lost: the jobs are this worker's until it
--         releases what it holds and does not know, or its lease ends. It is never repeated blindly.

taker.worker, taker.lease, taker.now = ARGV[3], ARGV[4], now_ms()
taker.result_ttl, taker.log_ttl = ARGV[6], ARGV[7]
local left = tonumber(ARGV[5])

if ARGV[8] ~= '' then
  local ticket = P .. ':standing:' .. taker.worker
  if unless_foreign(redis.pcall('GET', ticket)) ~= ARGV[8] then return false end
  redis.call('DEL', ticket)
end
local next_due = promote_due()
for i = 1, #KEYS - 1, 2 do
  left = left - serve(KEYS[i], KEYS[i + 1], math.min(left, tonumber(ARGV[9 + (i - 1) / 2])))
end
return { taker.now, next_due, taker.regrouped, left > 0 and last_entries(KEYS) or {}, taker.jobs, taker.foreign }
