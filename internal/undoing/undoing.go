// Package undoing gives a failed call time to undo what it did.
package undoing

import (
	"context"
	"time"
)

// most is how long a failed call may take to undo what it did.
const most = 20 * time.Second

// Context returns a context for undoing, which does not end with the caller's. It ends after most, so that a program that hangs does not hold the pool for
// ever.
func Context(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), most)
}
