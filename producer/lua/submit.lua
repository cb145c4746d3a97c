-- submit: put jobs into their queues, each exactly once however often the call is repeated.
--
-- KEYS         delay, deadline, the queues of the jobs; all others are built from the prefix
-- ARGV[3]      number of fields per job (12)
-- then per job id, request, model, priority, tenant, deadline ms after now (0: none),
--              delay ms, max failures ('' : the worker's), on_disconnect (continue, cancel), payload digest
--              ('' without a key; no spaces), idempotency key ('' : none), traceparent ('' : none)
-- Returns per job {outcome, id}: 0 accepted (or accepted by an earlier call with this id),
--              1 the same job is there under this idempotency key, 2 another one is; 3: the tenant
--              has as many jobs waiting as it may, and `id` is how many ms later to try again.
-- Error BADJOB: a field is of a wrong form. It names the job (from 1), the field and what it must be; none
--              of the call's jobs was accepted. What the request holds is checked by who claims it.
-- If it never runs: nothing was accepted. If its reply is lost: repeat it with the same ids.

local now, width, replies, refused = now_ms(), tonumber(ARGV[3]) or 0, {}, {}

local function whole(value, digits) return #value <= digits and string.find(value, '^%d+$') end

-- The sequences of UTF-8 beyond ASCII, those of two bytes first.
local SEQUENCES = {
  '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '[\225-\236\238\239][\128-\191][\128-\191]', '\240[\144-\191][\128-\191][\128-\191]',
  '\244[\128-\143][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
}

local function is_utf8(value)
  if not string.find(value, '[\128-\255]') then return true end
  for _, sequence in ipairs(SEQUENCES) do value = string.gsub(value, sequence, ' ') end
  return not string.find(value, '[\128-\255]')
end

local PRIORITY = { interactive = true, default = true, batch = true }
local ON_DISCONNECT = { continue = true, cancel = true }

-- By their place among a job's fields: name, what it must be, whether it is. What gets past these is
-- counted with, compared, or made part of a key.
local RULES = {
  { 0, 'id', 'a job id of this partition, <uuid7>.<p> in small letters', is_job_id },
  { 2, 'model', '1 to 1024 bytes of UTF-8 without control characters', function(value)
    return #value >= 1 and #value <= 1024 and not string.find(value, '%c') and is_utf8(value)
  end },
  { 3, 'priority', 'interactive, default or batch', function(value) return PRIORITY[value] end },
  { 4, 'tenant', "1 to 64 letters, digits, '_', '.' or '-'", function(value)
    return #value <= 64 and string.find(value, '^[%w_.%-]+$')
  end },
  { 5, 'deadline', 'whole ms, 0 for none', function(value) return whole(value, 12) end },
  { 6, 'delay', 'whole ms', function(value) return whole(value, 12) end },
  { 7, 'max failures', "0 to 1000, or '' for the worker's", function(value)
    return value == '' or (whole(value, 4) and tonumber(value) <= 1000)
  end },
  { 8, 'on_disconnect', 'continue or cancel', function(value) return ON_DISCONNECT[value] end },
}

-- What is wrong with the call, as the error to answer with; nil where nothing is.
local function fault()
  if width < 12 or (#ARGV - 3) % width ~= 0 then
    return 'BADJOB a job has 12 fields or more, and all as many as ARGV[3] says; got ' .. #ARGV - 3
      .. ' by ' .. tostring(ARGV[3])
  end
  local function said(a, name, way_out, value)
    local job = (a - 4) / width + 1
    local got = "; got '" .. string.sub(value, 1, 80) .. "'"
    return 'BADJOB job ' .. job .. ': ' .. name .. ' must be ' .. way_out .. got
  end
  local good = {} -- the jobs of a call are mostly alike
  for a = 4, #ARGV, width do
    for i, rule in ipairs(RULES) do
      local value = ARGV[a + rule[1]]
      if value ~= good[i] and not rule[4](value) then return said(a, rule[2], rule[3], value) end
      good[i] = value
    end
    if ARGV[a + 10] ~= '' and not string.find(ARGV[a + 9], '^%S+$') then
      return said(a, 'payload digest', 'a word where there is an idempotency key', ARGV[a + 9])
    end
  end
end

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

local wrong = fault()
if wrong then return redis.error_reply('-' .. wrong) end
for a = 4, #ARGV, width do
  local job, idem, reply = job_key(ARGV[a]), nil, nil
  if ARGV[a + 10] ~= '' then idem = P .. ':idem:' .. ARGV[a + 4] .. ':' .. ARGV[a + 10] end
  if redis.call('EXISTS', job) == 1 then reply = { 0, ARGV[a] } end
  if not reply and idem then reply = known(idem, ARGV[a + 9]) end
  replies[#replies + 1] = reply or accept(a, job, idem)
end
return replies
