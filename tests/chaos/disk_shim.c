/* Intercept a process's calls that change the files of one directory whose names begin with notso.db: count them, make
   selected ones fail, trace them, and shift the clock.

   NOTSO_SHIM_STATE names a file with a `struct state`, shared with the test. NOTSO_SHIM_FILES is the prefix of the
   watched paths. NOTSO_SHIM_TRACE, if set, names a file to which every call is appended: a header of 24 bytes
   (kind, errno, length of name, length of data, offset), then name and data. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct state {
  int64_t calls;      /* number of calls so far */
  int64_t fail_from;  /* number of the first call to fail, counted from 1; 0: none */
  int64_t fail_to;    /* number of the last call to fail */
  int64_t error;      /* errno of failing calls */
  int64_t failed;     /* number of calls that have failed */
  int64_t clock_seconds; /* seconds added to the time of day */
};

enum kind { WRITE = 1, SYNC = 2, CUT = 3, UNLINK = 4, CREATE = 5 };

static struct state *state;
static const char *files;
static size_t files_length;
static int trace = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("NOTSO_SHIM_STATE");
  int descriptor = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (descriptor >= 0) {
    void *map = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    state = map == MAP_FAILED ? NULL : map;
    close(descriptor);
  }
  files = getenv("NOTSO_SHIM_FILES");
  files_length = files ? strlen(files) : 0;
  path = getenv("NOTSO_SHIM_TRACE");
  if (path) trace = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int watched(const char *path) { return state && files && !strncmp(path, files, files_length); }

/* Store the path of an open file; return whether it is a watched file or the directory of the watched files. */
static int named(int descriptor, char *path, size_t size) {
  char link[64];
  if (!state || !files) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, size - 1);
  if (length < 0) return 0;
  path[length] = 0;
  size_t directory = (size_t)(strrchr(files, '/') - files);
  return watched(path) || ((size_t)length == directory && !strncmp(path, files, directory));
}

/* Return the errno this call must fail with, or 0. Hold the lock until `done`, so that the trace is in order. */
static int judge(void) {
  pthread_mutex_lock(&lock);
  int64_t number = ++state->calls;
  if (!state->fail_from || number < state->fail_from || number > state->fail_to) return 0;
  state->failed++;
  return (int)state->error;
}

static void done(enum kind kind, const char *path, const void *data, size_t size, int64_t offset, int error) {
  if (trace >= 0) {
    uint32_t header[6] = {kind, (uint32_t)error, (uint32_t)strlen(path), (uint32_t)size};
    memcpy(header + 4, &offset, sizeof offset);
    if (syscall(SYS_write, trace, header, sizeof header) != sizeof header ||
        syscall(SYS_write, trace, path, strlen(path)) != (ssize_t)strlen(path) ||
        (size && syscall(SYS_write, trace, data, size) != (ssize_t)size))
      abort();
  }
  pthread_mutex_unlock(&lock);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
  char path[4096];
  if (!named(descriptor, path, sizeof path)) return REAL(pwrite64)(descriptor, data, size, offset);
  int error = judge();
  ssize_t result = error ? -1 : REAL(pwrite64)(descriptor, data, size, offset);
  done(WRITE, path, data, result > 0 ? (size_t)result : 0, offset, error);
  if (error) errno = error;
  return result;
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
  return pwrite64(descriptor, data, size, offset);
}

ssize_t write(int descriptor, const void *data, size_t size) {
  char path[4096];
  if (!named(descriptor, path, sizeof path)) return REAL(write)(descriptor, data, size);
  int64_t offset = lseek(descriptor, 0, SEEK_CUR);
  int error = judge();
  ssize_t result = error ? -1 : REAL(write)(descriptor, data, size);
  done(WRITE, path, data, result > 0 ? (size_t)result : 0, offset, error);
  if (error) errno = error;
  return result;
}

static int synced(int descriptor, int (*real)(int)) {
  char path[4096];
  if (!named(descriptor, path, sizeof path)) return real(descriptor);
  int error = judge();
  int result = error ? -1 : real(descriptor);
  done(SYNC, path, NULL, 0, 0, error);
  if (error) errno = error;
  return result;
}

int fsync(int descriptor) { return synced(descriptor, REAL(fsync)); }
int fdatasync(int descriptor) { return synced(descriptor, REAL(fdatasync)); }

int ftruncate64(int descriptor, off64_t size) {
  char path[4096];
  if (!named(descriptor, path, sizeof path)) return REAL(ftruncate64)(descriptor, size);
  int error = judge();
  int result = error ? -1 : REAL(ftruncate64)(descriptor, size);
  done(CUT, path, NULL, 0, size, error);
  if (error) errno = error;
  return result;
}

int ftruncate(int descriptor, off_t size) { return ftruncate64(descriptor, size); }

int unlink(const char *path) {
  if (!watched(path)) return REAL(unlink)(path);
  int error = judge();
  int result = error ? -1 : REAL(unlink)(path);
  done(UNLINK, path, NULL, 0, 0, error);
  if (error) errno = error;
  return result;
}

static int opened(const char *path, int flags, mode_t mode) {
  if (!(flags & O_CREAT) || !watched(path)) return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
  int error = judge();
  int result = error ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
  done(CREATE, path, NULL, 0, 0, error);
  if (error) errno = error;
  return result;
}

int open(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return opened(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return opened(path, flags, mode);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int result = (int)syscall(SYS_clock_gettime, clock, time);
  if (state && !result && clock == CLOCK_REALTIME) time->tv_sec += state->clock_seconds;
  return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *kept) {
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  if (kept) *kept = now.tv_sec;
  return now.tv_sec;
}
