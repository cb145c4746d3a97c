-- submit: put jobs into their queues, each exactly once however often the call is repeated.
--
-- KEYS         delay, deadline, the queues of the jobs; all others are built from the prefix
-- ARGV[3]      number of fields per job (12)
-- then per job id, request, model, priority, tenant, deadline ms after now (0: none),
--              delay ms, max failures ('' : the worker's), on_disconnect, payload digest,
--              idempotency key ('' : none), traceparent
-- Returns per job {outcome, id}: 0 accepted (or accepted by an earlier call with this id),
--              1 the same job is there under this idempotency key, 2 another one is; 3: the tenant
--              has as many jobs waiting as it may, and `id` is how many ms later to try again.
-- If it never runs: nothing was accepted. If its reply is lost: repeat it with the same ids.

local now, width, replies, refused = now_ms(), tonumber(ARGV[3]), {}, {}

local function known(idem, digest)
  local found = redis.call('GET', idem)
  if not found then return nil end
  local id, first = string.match(found, '^(%S+) (%S+)$')
  if redis.call('EXISTS', job_key(id)) == 0 then return nil end
  return { first == digest and 1 or 2, id }
end

local function accept(a, job, idem)
  local id, deadline, delay, tenant = ARGV[a], tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]), ARGV[a + 4]
  if not has_room(tenant, 'waiting') then
    refused[tenant] = (refused[tenant] or 0) + 1
    return { 3, tostring(retry_after(tenant, refused[tenant], now)) }
  end
  if deadline > 0 then deadline = now + deadline end
  local hash = {
    'state', 'waiting', 'attempt', 0, 'failures', 0, 'offset', 0, 'last', '0-0',
    'request', ARGV[a + 1], 'model', ARGV[a + 2], 'priority', ARGV[a + 3], 'tenant', tenant,
    'submitted', now, 'deadline', deadline,
  }
  local function also(name, value) hash[#hash + 1] = name; hash[#hash + 1] = value end
  if ARGV[a + 7] ~= '' then also('max_failures', ARGV[a + 7]) end
  if ARGV[a + 8] ~= 'continue' then also('on_disconnect', ARGV[a + 8]) end
  if ARGV[a + 11] ~= '' then also('traceparent', ARGV[a + 11]) end
  if idem then also('idem', idem) end
  if delay > 0 then
    also('due', now + delay)
    redis.call('ZADD', KEYS[1], now + delay, id)
  elseif limits_of(tenant) then
    also('stream', hold_back(id, tenant, ARGV[a + 2] .. ':' .. ARGV[a + 3], now))
  else
    local queue = P .. ':q:' .. ARGV[a + 2] .. ':' .. ARGV[a + 3]
    also('stream', queue)
    also('entry', redis.call('XADD', queue, '*', 'j', id))
  end
  redis.call('ZADD', P .. ':live:' .. ARGV[a + 2], now + delay, id)
  if deadline > 0 then redis.call('ZADD', KEYS[2], deadline, id) end
  redis.call('HSET', job, unpack(hash)) -- after what fails on a key that is not ours: entries of no job are dropped
  if idem then redis.call('SET', idem, id .. ' ' .. ARGV[a + 9]) end
  account(id, tenant, 'waiting')
  return { 0, id }
end

for a = 4, #ARGV, width do
  local job, idem, reply = job_key(ARGV[a]), nil, nil
  if ARGV[a + 10] ~= '' then idem = P .. ':idem:' .. ARGV[a + 4] .. ':' .. ARGV[a + 10] end
  if redis.call('EXISTS', job) == 1 then reply = { 0, ARGV[a] } end
  if not reply and idem then reply = known(idem, ARGV[a + 9]) end
  replies[#replies + 1] = reply or accept(a, job, idem)
end
return replies
