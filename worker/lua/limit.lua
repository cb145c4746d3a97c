-- limit: a tenant's limits are set or removed, and what waits at them goes on where it may now.
--
-- KEYS[1] limits
-- ARGV[3] tenant (`*`: every one without limits of its own), ARGV[4] set, remove, or settle (the limits
--         of others have changed for this tenant), ARGV[5] `<most running> <most waiting>`, empty: no limit
-- Returns 1 when the tenant has limits afterwards, its own or the common ones.
-- If it never runs: the limits are as before.
--
-- The jobs that were there before the limits are counted by a walk with `repair`.

local tenant = ARGV[3]
if ARGV[4] == 'set' then
  redis.call('HSET', KEYS[1], tenant, ARGV[5])
elseif ARGV[4] == 'remove' then
  redis.call('HDEL', KEYS[1], tenant)
end
if tenant == '*' then return redis.call('HEXISTS', KEYS[1], tenant) end

for _, class in ipairs(redis.call('SMEMBERS', tenant_key(tenant, 'parked'))) do take_turns(tenant, class) end
if limits_of(tenant) then return 1 end
for _, name in ipairs({ 'running', 'waiting', 'drain' }) do redis.call('DEL', tenant_key(tenant, name)) end
return 0
