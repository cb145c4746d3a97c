-- adopt: give Redis back a running job that it has forgotten (FLUSHALL, a restart without a file).
--
-- KEYS[1] job hash, KEYS[2] event log, KEYS[3] queue stream, KEYS[4] live jobs of the model, KEYS[5] deadline
-- ARGV[3] id, ARGV[4] worker, ARGV[5] lease ms, ARGV[6] attempt it had, ARGV[7] request, ARGV[8] model,
-- ARGV[9] priority, ARGV[10] tenant, ARGV[11] deadline ms (0: none), ARGV[12] submitted ms,
-- ARGV[13] max failures ('' : the worker's), ARGV[14] on_disconnect, ARGV[15] failures, ARGV[16] mark,
-- ARGV[17] preempted, ARGV[18] traceparent, ARGV[19] idempotency key ('' : none), ARGV[20] payload digest,
-- then what was logged so far, as append_events takes it
-- Returns the new attempt (also when an earlier try was it); 0 when Redis knows the job otherwise, or
--         another one that was submitted under its idempotency key meanwhile: nothing was written then.
-- If it never runs: the job is gone, and its subscribers are told so.
--
-- The log is written again as it was, entry for entry, so a subscriber's cursor keeps its meaning.

local id, attempt, now = ARGV[3], tonumber(ARGV[6]) + 1, now_ms()
local there = fields(KEYS[1], 'state', 'owner', 'attempt')
if there.state then
  -- a repeated call after a lost reply finds what the first one made
  local ours = there.state == 'running' and there.owner == ARGV[4] and tonumber(there.attempt) == attempt
  return ours and attempt or 0
end
local idem = ARGV[19] ~= '' and P .. ':idem:' .. ARGV[10] .. ':' .. ARGV[19] or nil
local other = idem and string.match(redis.call('GET', idem) or '', '^(%S+) ')
if other and redis.call('EXISTS', job_key(other)) == 1 then return 0 end

local entry = redis.call('XADD', KEYS[3], '*', 'j', id)
redis.pcall('XGROUP', 'CREATE', KEYS[3], GROUP, '0')
redis.call('XCLAIM', KEYS[3], GROUP, ARGV[4], 0, entry, 'FORCE', 'JUSTID')
redis.call('HSET', KEYS[1], 'state', 'running', 'attempt', attempt, 'failures', ARGV[15], 'offset', 0, 'last', '0-0',
  'request', ARGV[7], 'model', ARGV[8], 'priority', ARGV[9], 'tenant', ARGV[10], 'deadline', ARGV[11],
  'submitted', ARGV[12], 'owner', ARGV[4], 'claimed', now, 'lease', ARGV[5], 'stream', KEYS[3], 'entry', entry)
local function also(name, value, usual) if value ~= usual then redis.call('HSET', KEYS[1], name, value) end end
also('max_failures', ARGV[13], '')
also('on_disconnect', ARGV[14], 'continue')
also('mark', ARGV[16], '0')
also('preempted', ARGV[17], '0')
also('traceparent', ARGV[18], '')
if ARGV[14] == 'cancel' and hearers(id) > 0 then redis.call('HSET', KEYS[1], 'watched', 1) end
if idem then
  redis.call('HSET', KEYS[1], 'idem', idem)
  redis.call('SET', idem, id .. ' ' .. ARGV[20])
end
redis.call('ZADD', KEYS[4], now, id)
account(id, ARGV[10], 'running')
if ARGV[11] ~= '0' then redis.call('ZADD', KEYS[5], ARGV[11], id) end

redis.call('DEL', KEYS[2])
local offset, last = append_events(id, { offset = 0, last = '0-0' }, ARGV, 21)
redis.call('HSET', KEYS[1], 'offset', offset, 'last', last)
return attempt
