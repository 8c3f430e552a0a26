"""Every system call with which the store writes, syncs, renames, links or removes. The seam for fault injection.

Methods are as small as the calls they stand for; what they mean is decided by their callers.
"""
# class FsIo: open(path, flags, mode, dir_fd=None) / pwrite(fd, buf, offset) (loops over short writes) / pread(fd, n, offset) /
#   append / fdatasync / fsync / fsync_dir(path) / rename / link / unlink / rmdir / mkdir(path, mode) / chmod / chown / utime / ftruncate /
#   fallocate?  lock_range(fd, start, length, exclusive, blocking=False) via F_OFD_SETLK, unlock_range / copy_file_range ...
# Everything opens with O_CLOEXEC | O_NOFOLLOW. Tests subclass it to fail the n-th call.
