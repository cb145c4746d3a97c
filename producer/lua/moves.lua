-- Put in front of every script: the moves of a job that several scripts share.

-- True of an error that says: somebody else's value lies at a key of ours. Nothing else passes for it.
local function is_foreign(err)
  local text = type(err) == 'table' and err.err or tostring(err)
  return string.find(text, 'WRONGTYPE', 1, true) ~= nil
end

-- The reply of a `redis.pcall`, with its error raised; nil where the key is not ours any more.
local function unless_foreign(reply)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not is_foreign(reply) then error(reply) end
  return nil
end

-- Calls, and goes on where that met a key that is not ours. `kinds` tells which it may have been: a
-- list of key, type. What is found goes to `foreign`: key, the type that lies there, the one that
-- belongs there. Returns what was called returns; nil then.
local function guarded(foreign, kinds, call, ...)
  local ok, found = pcall(call, ...)
  if ok then return found end
  if not is_foreign(found) then -- a bare text would be told with its line before its code
    error(type(found) == 'table' and found or { err = found })
  end
  local list, count = kinds(), #foreign
  for i = 1, #list, 2 do
    local kind = redis.call('TYPE', list[i]).ok
    if kind ~= 'none' and kind ~= list[i + 1] then foreign[#foreign + 1] = { list[i], kind, list[i + 1] } end
  end
  if #foreign == count then foreign[count + 1] = { list[1], 'foreign value beside it', list[2] } end
  return nil
end

-- Takes an entry out of its queue, whoever holds it.
local function unqueue(stream, entry)
  if stream and stream ~= '' then
    redis.pcall('XACK', stream, GROUP, entry)
    unless_foreign(redis.pcall('XDEL', stream, entry))
  end
end

-- True when the entry that the hash names is in its queue, and is this job's (a stream made anew may
-- give an old id to another job).
local function queued(id, job)
  if is_backlog(job.stream) then return redis.call('ZSCORE', job.stream, id) ~= false end
  local found = (unless_foreign(redis.pcall('XRANGE', job.stream, job.entry, job.entry)) or {})[1]
  return found ~= nil and found[2][2] == id
end

-- The other stream of the same class.
local function beside(stream)
  return string.sub(stream, -6) == ':front' and string.sub(stream, 1, -7) or stream .. ':front'
end

-- Adds a job's entry to a queue, or beside it where the queue is not ours any more. Returns stream and entry.
local function enter(id, stream)
  local entry = unless_foreign(redis.pcall('XADD', stream, '*', 'j', id))
  if entry then return stream, entry end
  return beside(stream), redis.call('XADD', beside(stream), '*', 'j', id)
end

-- Puts a job at the end of a queue; the hash names the entry.
local function enqueue(id, queue)
  local stream, entry = enter(id, queue)
  redis.call('HSET', job_key(id), 'state', 'waiting', 'stream', stream, 'entry', entry)
  redis.call('HDEL', job_key(id), 'owner', 'claimed', 'due')
end

-- Lets a job wait where its class and tenant belong; `front`: before those that came after it. Needs
-- model, priority, tenant, submitted.
local function place(id, job, front, now)
  local class = job.model .. ':' .. job.priority
  if limits_of(job.tenant) then
    local backlog = hold_back(id, job.tenant, class, now, front and tonumber(job.submitted))
    redis.call('HSET', job_key(id), 'state', 'waiting', 'stream', backlog)
    redis.call('HDEL', job_key(id), 'owner', 'claimed', 'due', 'entry')
  else
    enqueue(id, P .. ':q:' .. class .. (front and ':front' or ''))
  end
  account(id, job.tenant, 'waiting')
end

-- A terminal event where the log ends, packed as Event.pack does.
local function last_event(job, reason, code, message)
  local event = { v = 1, offset = tonumber(job.offset), attempt = tonumber(job.attempt), final = true }
  event.finish_reason = reason
  if code then event.error = { code, message } end
  return cmsgpack.pack(event)
end

-- Makes a state final: hash, log, indexes, TTLs. The terminal event must be in the log already.
-- `job` needs idem, model, tenant, stream. A failed job keeps its request, for a replay from the dead
-- letter.
local function close(id, job, state, now, result_ttl, log_ttl)
  local key, ttl = job_key(id), tonumber(result_ttl)
  if is_backlog(job.stream) then redis.call('ZREM', job.stream, id) end
  account(id, job.tenant, state)
  drained(job.tenant, now)
  redis.call('HSET', key, 'state', state, 'ended', now)
  redis.call('HDEL', key, 'owner', 'stream', 'entry', 'due', 'alone')
  if state ~= 'failed' then redis.call('HDEL', key, 'request') end
  for _, index in ipairs({ 'live:' .. job.model, 'deadline', 'delay' }) do
    redis.call('ZREM', P .. ':' .. index, id)
  end
  redis.call('PEXPIRE', key, ttl)
  redis.call('PEXPIRE', log_key(id), log_ttl)
  if job.idem then redis.call('PEXPIRE', job.idem, ttl) end
end

-- Ends a job on behalf of whoever asked: terminal event, then close. Needs model, tenant, attempt,
-- offset, last, idem, stream.
local function end_job(id, job, state, now, result_ttl, log_ttl, code, message)
  local payload = last_event(job, state == 'failed' and 'error' or state, code, message)
  local entry = append(id, job.last, job.offset .. '-*', payload)
  redis.call('HSET', job_key(id), 'last', entry)
  if code then redis.call('HSET', job_key(id), 'error_code', code, 'error_message', message) end
  close(id, job, state, now, result_ttl, log_ttl)
end

-- Keeps a failed job for a look and a replay.
local function bury(id, now)
  redis.call('ZADD', P .. ':dead', now, id)
  redis.call('PEXPIRE', job_key(id), DEAD_TTL_MS)
end

-- One more failure. Tokens logged since the last one mean that the job itself is not the cause.
local function count_failure(id, job)
  local failures, offset = tonumber(job.failures), tonumber(job.offset)
  if offset > tonumber(job.mark or '0') then failures = 0 end
  redis.call('HSET', job_key(id), 'failures', failures + 1, 'mark', offset)
  return failures + 1
end

local function past(deadline, now) return deadline and deadline ~= '0' and tonumber(deadline) <= now end

-- A job that its worker hands back, or lost: to the front of its class, or to the end that was asked
-- for. It must be out of its queue already. Needs what place and end_job need, cancel and deadline.
local function put_back(id, job, now, result_ttl, log_ttl)
  if job.cancel or past(job.deadline, now) then
    end_job(id, job, job.cancel and 'cancelled' or 'expired', now, result_ttl, log_ttl)
  else
    place(id, job, true, now)
  end
end
