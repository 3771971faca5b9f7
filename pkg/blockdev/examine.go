package blockdev

import (
	"context"
	"fmt"
)

// Examiner is the location of a pool that can say what a pool there needs, and what it has. It is for people (driver doctor).
type Examiner interface {
	// Examine reports one thing at a time, in an order that reads well. It opens no pool, waits for nobody who uses it, and changes nothing.
	Examine(ctx context.Context, report Report)
}

// Verdict is what a thing that was found means for the pool.
type Verdict string

// The verdicts.
const (
	OK      Verdict = "ok"
	Warning Verdict = "warning" // something will not work, or not as well
	Failure Verdict = "failure" // the pool cannot be used
)

// Report takes one thing that was found: its verdict, and a message that says what it is and, if it is bad, what to do.
type Report func(verdict Verdict, message string)

// OK reports that something is as it should be.
func (r Report) OK(format string, args ...any) { r(OK, fmt.Sprintf(format, args...)) }

// Warning reports that something will not work, or not as well.
func (r Report) Warning(format string, args ...any) { r(Warning, fmt.Sprintf(format, args...)) }

// Failure reports why a pool cannot be used.
func (r Report) Failure(format string, args ...any) { r(Failure, fmt.Sprintf(format, args...)) }
