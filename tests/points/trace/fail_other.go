//go:build !amd64

package trace

import (
	"errors"

	"golang.org/x/sys/unix"
)

// CanFail: Verdict.Fail works here. It does not: registers have other names.
const CanFail = false

func registers(int, *syscallInfo) error { return errors.ErrUnsupported }

func skip(int) error                  { return errors.ErrUnsupported }
func setResult(int, unix.Errno) error { return errors.ErrUnsupported }
