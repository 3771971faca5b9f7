//go:build !amd64

package trace

import "errors"

// CanFail: Verdict.Fail and Verdict.Swallow work here. They do not: registers have other names.
const CanFail = false

func registers(int, *syscallInfo) error { return errors.ErrUnsupported }

func skip(int) error               { return errors.ErrUnsupported }
func setResult(int, uintptr) error { return errors.ErrUnsupported }
