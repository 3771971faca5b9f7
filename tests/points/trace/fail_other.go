//go:build !amd64

package trace

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Registers have other names elsewhere.

func skip(int) error                  { return errors.ErrUnsupported }
func setResult(int, unix.Errno) error { return errors.ErrUnsupported }
