// Package undoing gives what a call has to undo the time for it.
package undoing

import (
	"context"
	"time"
)

// most bounds how long a call that failed goes on to undo what it did.
const most = 20 * time.Second

// Context is the context for what has to be undone also when the caller's time is over. It ends
// after most: a program that hangs then must not keep the pool for ever.
func Context(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), most)
}
