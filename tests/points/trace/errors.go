package trace

import (
	"strings"

	"golang.org/x/sys/unix"
)

// Errors are those that the call can end with: the tables are of the manual pages; of the mount API, of devices and of configfs of the kernel's source.
func (c Call) Errors() []unix.Errno {
	if c.Path == fabrics {
		return []unix.Errno{unix.EIO, unix.ECONNREFUSED, unix.ENOMEM}
	}
	if strings.HasPrefix(c.Path, "/sys/kernel/config/") || strings.HasPrefix(c.Path, "/sys/") && strings.Contains(c.Path, "/nvme") {
		return kernfs[c.Name]
	}
	return errnos[c.Name]
}

// kernfs has the errors in configfs, and in sysfs of NVMe, where each file and folder is something of the kernel.
var kernfs = map[string][]unix.Errno{
	"write":     {unix.ENOMEM, unix.EINVAL, unix.EBUSY},
	"mkdirat":   {unix.ENOMEM},
	"symlinkat": {unix.ENOMEM, unix.EADDRNOTAVAIL},
	"unlinkat":  {unix.ENOMEM, unix.EBUSY},
	"fchmodat":  {unix.ENOMEM},
}

var errnos = map[string][]unix.Errno{
	"openat O_CREAT":             {unix.EMFILE, unix.ENOSPC, unix.ENOMEM, unix.EINTR, unix.EROFS},
	"write":                      {unix.ENOSPC, unix.EIO, unix.EINTR},
	"pwrite64":                   {unix.ENOSPC, unix.EIO, unix.EINTR},
	"copy_file_range":            {unix.ENOSPC, unix.EIO, unix.ENOMEM},
	"fsync":                      {unix.EIO, unix.ENOSPC},
	"fdatasync":                  {unix.EIO, unix.ENOSPC},
	"ftruncate":                  {unix.EIO, unix.EINTR},
	"fallocate":                  {unix.ENOSPC, unix.EINTR, unix.EIO},
	"unlinkat":                   {unix.EIO, unix.EROFS},
	"mkdirat":                    {unix.ENOSPC, unix.ENOMEM},
	"execve":                     {unix.ENOMEM},
	"fsopen":                     {unix.EMFILE, unix.ENOMEM},
	"fsconfig CREATE":            {unix.EIO, unix.ENOMEM, unix.EBUSY},
	"fsmount":                    {unix.EMFILE, unix.ENOMEM},
	"open_tree":                  {unix.EMFILE, unix.ENOMEM},
	"mount_setattr":              {unix.ENOMEM},
	"move_mount":                 {unix.ENOMEM},
	"umount2":                    {unix.EBUSY, unix.ENOMEM},
	"ioctl LOOP_CTL_GET_FREE":    {unix.ENOMEM, unix.EINTR},
	"ioctl LOOP_CONFIGURE":       {unix.EBUSY, unix.ENOMEM, unix.EINTR},
	"ioctl LOOP_CLR_FD":          {unix.EINTR},
	"ioctl LOOP_SET_CAPACITY":    {unix.ENOMEM, unix.EINTR},
	"ioctl BLKROSET":             {unix.ENOMEM},
	"ioctl FICLONE":              {unix.ENOSPC, unix.EIO},
	"ioctl FIFREEZE":             {unix.EIO},
	"ioctl FITHAW":               {unix.EIO},
	"ioctl XFS_IOC_FSGROWFSDATA": {unix.EIO, unix.ENOSPC, unix.ENOMEM},
	"ioctl BTRFS_IOC_FORGET_DEV": {unix.ENOMEM},
	"ioctl BLKZEROOUT":           {unix.EIO, unix.EINTR},
	"ioctl DM_DEV_CREATE":        {unix.ENOMEM},
	"ioctl DM_DEV_REMOVE":        {unix.ENOMEM},
	"ioctl DM_DEV_RENAME":        {unix.ENOMEM},
	"ioctl DM_DEV_SUSPEND":       {unix.ENOMEM, unix.EINTR},
	"ioctl DM_TABLE_LOAD":        {unix.ENOMEM},
	"ioctl DM_TABLE_CLEAR":       {unix.ENOMEM},
	"ioctl DM_TARGET_MSG":        {unix.ENOMEM, unix.EIO},
	"io_submit pwrite":           {unix.EIO, unix.ENOMEM},
	"mknodat":                    {unix.ENOSPC, unix.ENOMEM},
	"symlinkat":                  {unix.ENOSPC, unix.ENOMEM},
}
