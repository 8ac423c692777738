/* SPDX-License-Identifier: MIT */
/*
 * The chip's sensors: a model that is driven by how long its engines were held, by
 * whichever function. Between two looks power is taken as constant, so energy is
 * exact and the rest follows it exponentially; nobody works on it meanwhile.
 */
#include <math.h>

#include "machine.h"

#define US_PER_MS 1000
/* No two looks closer than this: the steps would be lost in rounding. */
#define LEAST_US 1000
/* More than the model comes to. */
#define MOST_UW 1000000000
#define MOST_UC 1000000000

static bool has_sensors(const VtpuCore *core)
{
    return core->function == 0;
}

/* Closer to `target` by what `us` microseconds do with a time constant in milliseconds. */
static int64_t approach(int64_t value, int64_t target, uint64_t us, unsigned constant_ms)
{
    double rest = exp(-(double)us / ((double)constant_ms * US_PER_MS));

    return target + (int64_t)((double)(value - target) * rest);
}

static int64_t steady_uc(int64_t uw)
{
    return VTPU_SENSOR_AMBIENT_MC * 1000ll + uw * VTPU_SENSOR_MC_PER_W / 1000;
}

void vtpu_sensors_init(VtpuCore *core)
{
    VtpuSensors *sensors = &core->sensors;

    sensors->seen_ns = vtpu_core_clock(core);
    sensors->held_ns = vtpu_engines_held_ns(core->chip);
    sensors->power_uw = VTPU_SENSOR_IDLE_MW * 1000ll;
    sensors->temperature_uc = steady_uc(sensors->power_uw);
}

bool vtpu_sensors_resume(VtpuCore *core)
{
    VtpuSensors *sensors = &core->sensors;

    sensors->seen_ns = vtpu_core_clock(core);
    sensors->held_ns = vtpu_engines_held_ns(core->chip);
    return sensors->power_uw >= 0 && sensors->power_uw <= MOST_UW &&
           sensors->temperature_uc >= 0 && sensors->temperature_uc <= MOST_UC;
}

void vtpu_sensors_update(VtpuCore *core)
{
    VtpuSensors *sensors = &core->sensors;
    uint64_t us = (vtpu_core_clock(core) - sensors->seen_ns) / 1000;

    if (!has_sensors(core) || us < LEAST_US) {
        return;
    }
    /* Threads read the clock before they take the chip's lock: it may go back a little. */
    int64_t held = (int64_t)(vtpu_engines_held_ns(core->chip) - sensors->held_ns);
    uint64_t held_us = held > 0 ? (uint64_t)held / 1000 : 0;
    held_us = held_us < us ? held_us : us;
    uint64_t base_mw = core->asleep ? VTPU_SENSOR_SLEEP_MW : VTPU_SENSOR_IDLE_MW;
    uint64_t nj = base_mw * us + VTPU_SENSOR_ACTIVE_MW * held_us;
    int64_t uw = (int64_t)((double)nj / (double)us * 1000);

    sensors->seen_ns += us * 1000;
    sensors->held_ns += held_us * 1000;
    sensors->energy_nj += nj;
    sensors->power_uw = approach(sensors->power_uw, uw, us, VTPU_SENSOR_POWER_MS);
    sensors->temperature_uc =
        approach(sensors->temperature_uc, steady_uc(uw), us, VTPU_SENSOR_THERMAL_MS);
}

static uint64_t temperature_mc(const VtpuCore *core)
{
    if (vtpu_injecting(core, VTPU_INJECT_TEMPERATURE)) {
        return core->inject[VTPU_INJECT_TEMPERATURE];
    }
    return (uint32_t)(core->sensors.temperature_uc / 1000);
}

uint64_t vtpu_sensor_read(VtpuCore *core, uint64_t offset)
{
    if (!has_sensors(core)) {
        return 0;
    }
    vtpu_sensors_update(core);
    switch (offset) {
    case VTPU_REG_SENSOR_TEMP:
        return temperature_mc(core);
    case VTPU_REG_SENSOR_TEMP_CRITICAL:
        return VTPU_SENSOR_CRITICAL_MC;
    case VTPU_REG_SENSOR_POWER:
        return (uint64_t)core->sensors.power_uw;
    case VTPU_REG_SENSOR_ENERGY:
        return core->sensors.energy_nj / 1000;
    default:
        return 0;
    }
}
