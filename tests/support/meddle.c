/* meddle.c - emulates another process that changes files between any two system calls: preloaded, driven by meddle.py.
 * Before the n-th call that accesses a file of the watched folder, all files there are deleted, truncated, overwritten,
 * or replaced by links to the file `victim` next to the folder. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { UNLINK, EMPTY, SPOIL, LINK };

static char folder[512], victim[512];
static int action, at, count;
static bool watched[1024];

void meddle_start(const char *where, const char *other, int what, int n)
{
    snprintf(folder, sizeof folder, "%s/", where);
    snprintf(victim, sizeof victim, "%s", other);
    action = what, at = n, count = 0;
}

int meddle_stop(void)
{
    folder[0] = 0;
    return count;
}

static void change(const char *path)
{
    if (action == UNLINK || action == LINK) syscall(SYS_unlink, path);
    if (action == LINK) syscall(SYS_symlink, victim, path);
    if (action == EMPTY) syscall(SYS_truncate, path, 0);
    if (action != SPOIL) return;
    int file = (int)syscall(SYS_open, path, O_RDWR, 0);
    static const char junk[4096] = {0x7f, 0x55, 0x11};
    for (off_t place = 0, end = lseek(file, 0, SEEK_END); place < end; place += 4096)
        syscall(SYS_pwrite64, file, junk, end - place < 4096 ? end - place : 4096, place);
    syscall(SYS_close, file);
}

/* Called before a system call that accesses the folder. */
static void touch(void)
{
    if (++count != at) return;
    char path[1024];
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s%s", folder, e->d_name);
        change(path);
    }
    if (d) closedir(d);
}

static bool inside(const char *path) { return folder[0] && !strncmp(path, folder, strlen(folder)); }
static bool known(int file) { return folder[0] && file >= 0 && file < 1024 && watched[file]; }

static int opened(const char *path, int file)
{
    if (file >= 0 && file < 1024) watched[file] = inside(path);
    return file;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name, parameters, ...)                                                                                    \
    int name parameters                                                                                                \
    {                                                                                                                  \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0;                                            \
        va_end(more);                                                                                                  \
        if (inside(path)) touch();                                                                                     \
        return opened(path, REAL(name)(__VA_ARGS__, flags, mode));                                                     \
    }
OPEN(open, (const char *path, int flags, ...), path)
OPEN(open64, (const char *path, int flags, ...), path)
OPEN(openat, (int base, const char *path, int flags, ...), base, path)
OPEN(openat64, (int base, const char *path, int flags, ...), base, path)

ssize_t read(int file, void *to, size_t n)
{
    if (known(file)) touch();
    return REAL(read)(file, to, n);
}

ssize_t write(int file, const void *from, size_t n)
{
    if (known(file)) touch();
    return REAL(write)(file, from, n);
}

int fsync(int file)
{
    if (known(file)) touch();
    return REAL(fsync)(file);
}

int rename(const char *from, const char *to)
{
    if (inside(from)) touch();
    return REAL(rename)(from, to);
}

int unlink(const char *path)
{
    if (inside(path)) touch();
    return REAL(unlink)(path);
}

#define MMAP(name)                                                                                                     \
    void *name(void *place, size_t n, int protection, int flags, int file, off_t from)                                 \
    {                                                                                                                  \
        if (known(file)) touch();                                                                                      \
        return REAL(name)(place, n, protection, flags, file, from);                                                    \
    }
MMAP(mmap)
MMAP(mmap64)
