/* LD_PRELOAD: a process whose wall clock is ahead of the machine's by the double in the file $CLOCK_AHEAD, in
   seconds. Other clocks are as they are, as when somebody sets a machine's time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double zero = 0.0;
static const volatile double *ahead_s = &zero;
static int (*machine_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void prepare(void) {
    machine_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *name = getenv("CLOCK_AHEAD");
    int file = name == NULL ? -1 : open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *shared = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) ahead_s = shared;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (machine_clock == NULL) prepare();
    int status = machine_clock(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += (time_t)*ahead_s;
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return status;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into != NULL) *into = now.tv_sec;
    return now.tv_sec;
}
