/* A libnvidia-ml.so.1 for machines without a GPU: it tells what the file in FAKE_NVML says.
 *
 * One line per GPU: name, memory used and total (MiB), utilisation (%), temperature, reasons of slow
 * clocks (bits), thermal and power violation (ns), uncorrected ECC errors, and pairs pid:MiB.
 * A -1 among the last three numbers is "not supported". XID events are lines "INDEX XID" that a
 * test writes into the FIFO FAKE_NVML.xids. The file is read anew at each call.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS_MAX 16
#define PROCESSES_MAX 16
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, TIMEOUT = 10, UNKNOWN = 999 };

struct gpu {
  char name[64];
  long long used, total, busy, celsius, reasons, thermal, power, ecc;
  unsigned pids[PROCESSES_MAX];
  long long bytes[PROCESSES_MAX];
  unsigned processes;
};
static _Thread_local struct gpu gpus[GPUS_MAX]; /* NVML may be called by any thread */
static int fifo = -1;

static unsigned load(void) {
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[1024];
  unsigned count = 0;
  if (!file) return 0;
  while (count < GPUS_MAX && fgets(line, sizeof line, file)) {
    struct gpu *gpu = &gpus[count];
    int end = 0;
    memset(gpu, 0, sizeof *gpu);
    if (sscanf(line, "%63s %lld %lld %lld %lld %lld %lld %lld %lld%n", gpu->name, &gpu->used,
               &gpu->total, &gpu->busy, &gpu->celsius, &gpu->reasons, &gpu->thermal, &gpu->power,
               &gpu->ecc, &end) < 9)
      continue;
    for (char *at = line + end; gpu->processes < PROCESSES_MAX;) {
      int read = 0;
      unsigned slot = gpu->processes;
      if (sscanf(at, " %u:%lld%n", &gpu->pids[slot], &gpu->bytes[slot], &read) < 2) break;
      gpu->processes++;
      at += read;
    }
    count++;
  }
  fclose(file);
  return count;
}

static struct gpu *found(void *handle) {
  unsigned index = (unsigned)(size_t)handle - 1;
  return index < load() ? &gpus[index] : NULL;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return load() ? OK : UNKNOWN; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "fake"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = load(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index >= load()) return INVALID;
  *handle = (void *)(size_t)(index + 1);
  return OK;
}
int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = (unsigned)(size_t)handle - 1;
  return OK;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
  struct gpu *gpu = found(handle);
  if (!gpu) return UNKNOWN;
  snprintf(name, size, "%s", gpu->name);
  return OK;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
  snprintf(uuid, size, "GPU-fake-%zu", (size_t)handle - 1);
  return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
  struct gpu *gpu = found(handle);
  if (!gpu) return UNKNOWN;
  memory[0] = (unsigned long long)gpu->total << 20;
  memory[1] = (unsigned long long)(gpu->total - gpu->used) << 20;
  memory[2] = (unsigned long long)gpu->used << 20;
  return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
  struct gpu *gpu = found(handle);
  if (!gpu) return UNKNOWN;
  rates[0] = (unsigned)gpu->busy;
  rates[1] = 0;
  return OK;
}
int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
  struct gpu *gpu = found(handle);
  (void)sensor;
  if (!gpu) return UNKNOWN;
  *celsius = (unsigned)gpu->celsius;
  return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
  struct gpu *gpu = found(handle);
  if (!gpu) return UNKNOWN;
  *reasons = (unsigned long long)gpu->reasons;
  return OK;
}
int nvmlDeviceGetViolationStatus(void *handle, unsigned policy, unsigned long long *times) {
  struct gpu *gpu = found(handle);
  long long time = gpu ? (policy == 1 ? gpu->thermal : gpu->power) : 0;
  if (!gpu) return UNKNOWN;
  if (time < 0) return NOT_SUPPORTED;
  times[0] = 0;
  times[1] = (unsigned long long)time;
  return OK;
}
int nvmlDeviceGetTotalEccErrors(void *handle, unsigned kind, unsigned counter,
                                unsigned long long *count) {
  struct gpu *gpu = found(handle);
  (void)kind, (void)counter;
  if (!gpu) return UNKNOWN;
  if (gpu->ecc < 0) return NOT_SUPPORTED;
  *count = (unsigned long long)gpu->ecc;
  return OK;
}
struct process {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *table) {
  struct gpu *gpu = found(handle);
  unsigned room = *count;
  if (!gpu) return UNKNOWN;
  *count = gpu->processes;
  if (room < gpu->processes || (!table && gpu->processes)) return TOO_SMALL;
  for (unsigned slot = 0; slot < gpu->processes; slot++) {
    table[slot].pid = gpu->pids[slot];
    table[slot].bytes =
        gpu->bytes[slot] < 0 ? ~0ull : (unsigned long long)gpu->bytes[slot] << 20;
    table[slot].gpu_instance = table[slot].compute_instance = ~0u;
  }
  return OK;
}
int nvmlEventSetCreate(void **set) { *set = (void *)(size_t)1; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *types) {
  (void)handle;
  *types = 8;
  return OK;
}
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
  char path[512];
  (void)handle, (void)types, (void)set;
  snprintf(path, sizeof path, "%s.xids", getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "");
  if (fifo < 0) fifo = open(path, O_RDWR | O_CLOEXEC);
  return fifo < 0 ? NOT_SUPPORTED : OK;
}
struct event {
  void *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout_ms) {
  struct pollfd ready = {.fd = fifo, .events = POLLIN};
  char line[64];
  size_t length = 0;
  unsigned index, xid;
  (void)set;
  if (poll(&ready, 1, timeout_ms > 0x7fffffff ? -1 : (int)timeout_ms) <= 0) return TIMEOUT;
  while (length < sizeof line - 1 && read(fifo, line + length, 1) == 1 && line[length] != '\n')
    length++;
  line[length] = 0;
  if (sscanf(line, "%u %u", &index, &xid) < 2) return UNKNOWN;
  memset(event, 0, sizeof *event);
  event->device = (void *)(size_t)(index + 1);
  event->type = 8;
  event->data = xid;
  return OK;
}
