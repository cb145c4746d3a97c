-- heartbeat: a worker's line in the worker table, or its leaving.
--
-- KEYS[1] workers, KEYS[2] the worker's hash
-- ARGV[3] worker, ARGV[4] ms until it counts as gone (0: it leaves now), then fields and values,
--         ARGV[5] the first field: where it is `incarnation`, the line of another one than ARGV[6] stays as it is
-- Returns the server's time in ms; or of that other one {incarnation, seen, host, pid, pids}.
-- If it never runs: the worker is not shown, and its model may look unserved. No job depends on it.

local now, ttl = now_ms(), tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 3600 * 1000)
if ttl == 0 then
  redis.call('ZREM', KEYS[1], ARGV[3])
  redis.call('DEL', KEYS[2])
  return now
end
local line = fields(KEYS[2], 'incarnation', 'seen', 'host', 'pid', 'pids')
if ARGV[5] == 'incarnation' and line.incarnation and line.incarnation ~= ARGV[6] then
  return { line.incarnation, tonumber(line.seen), line.host or '', tonumber(line.pid), line.pids or '' }
end
redis.call('ZADD', KEYS[1], now, ARGV[3])
redis.call('DEL', KEYS[2])
local values = { 'seen', now }
for i = 5, #ARGV do values[#values + 1] = ARGV[i] end
redis.call('HSET', KEYS[2], unpack(values))
redis.call('PEXPIRE', KEYS[2], ttl)
return now
