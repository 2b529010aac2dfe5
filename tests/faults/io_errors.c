/* Input and output errors on demand, for files whose path contains CACHESVC_FAULT_MATCH: loaded by LD_PRELOAD.
 *
 * The file CACHESVC_FAULT_FILE says what fails now, one "operation errno" a line: "write 5", "sync 5", "read 5". It is
 * read at every call, so that a test can change it while the process runs. Nothing fails while it is empty or missing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int fault(const char *operation, int descriptor) {
    const char *control = getenv("CACHESVC_FAULT_FILE"), *match = getenv("CACHESVC_FAULT_MATCH");
    char link[64], path[4096], name[32];
    int code, found = 0;
    if (!control || !match) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, match)) return 0;
    FILE *file = fopen(control, "re");
    if (!file) return 0;
    while (fscanf(file, "%31s %d", name, &code) == 2)
        if (!strcmp(name, operation)) found = code;
    fclose(file);
    return found;
}

#define WRAP(type, name, operation, parameters, arguments)                                          \
    type name parameters {                                                                          \
        static type(*real) parameters;                                                              \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                              \
        int code = fault(operation, fd);                                                            \
        if (code) { errno = code; return -1; }                                                      \
        return real arguments;                                                                      \
    }

#define VECTOR int fd, const struct iovec *iov, int count, off_t offset
WRAP(ssize_t, pwritev, "write", (VECTOR), (fd, iov, count, offset))
WRAP(ssize_t, pwritev64, "write", (VECTOR), (fd, iov, count, offset))
WRAP(ssize_t, pwritev2, "write", (VECTOR, int flags), (fd, iov, count, offset, flags))
WRAP(ssize_t, pwritev64v2, "write", (VECTOR, int flags), (fd, iov, count, offset, flags))
WRAP(ssize_t, preadv, "read", (VECTOR), (fd, iov, count, offset))
WRAP(ssize_t, preadv64, "read", (VECTOR), (fd, iov, count, offset))
WRAP(ssize_t, preadv2, "read", (VECTOR, int flags), (fd, iov, count, offset, flags))
WRAP(ssize_t, preadv64v2, "read", (VECTOR, int flags), (fd, iov, count, offset, flags))
WRAP(int, fdatasync, "sync", (int fd), (fd))
