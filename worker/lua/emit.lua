-- emit: log and announce what a worker's running jobs have made, for all of them at once.
--
-- KEYS[1] the first job's hash; the others are built from the prefix
-- ARGV[3] msgpack, as one value costs the client a tenth of thousands: a list with per job
--         [id, attempt, events as append_events takes them]
-- Returns triples, flat, for the jobs that there is something to say of: position (from 1), code,
--         offset logged. code is a sum: 1 fenced (another attempt, or ended: stop, throw away),
--         2 behind (the log does not end where these events start: nothing was written, go on from
--         the offset returned), 4 cancel was asked for, 8 the deadline has passed.
-- If it never runs: nothing is visible; the same events may be sent again, also merged with later
--         ones as long as their boundaries stay. If its reply is lost: the repeated call skips what is logged.

local now, replies = now_ms(), {}

-- One job's. Most calls are this function many times over, so it makes no table of the fields that it reads.
local function emit(key, id, attempt, events)
  local state, claim, offset, last, cancel, deadline, wish =
    unpack(redis.call('HMGET', key, 'state', 'attempt', 'offset', 'last', 'cancel', 'deadline', 'on_disconnect'))
  if state ~= 'running' or tonumber(claim) ~= attempt then return 1, 0 end
  local code, after, entry, heard = 0, append_events(id, { offset = offset, last = last or nil }, events, 1)
  if after == nil then
    code, after = 2, tonumber(offset)
  else
    redis.call('HSET', key, 'offset', after, 'last', entry)
    if wish == 'cancel' and forsaken(id, fields(key, 'on_disconnect', 'watched', 'alone'), now, heard) then
      redis.call('HSET', key, 'cancel', 1)
      cancel = '1'
    end
  end
  if cancel then code = code + 4 end
  if past(deadline, now) then code = code + 8 end
  return code, after
end

for k, one in ipairs(cmsgpack.unpack(ARGV[3])) do
  local code, offset = emit(job_key(one[1]), one[1], one[2], one[3])
  if code > 0 then
    local n = #replies
    replies[n + 1], replies[n + 2], replies[n + 3] = k, code, offset
  end
end
return replies
