package kube

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// page is how many objects are asked for at once.
const page = 500

// EachPage lists all objects of a kind with a client that reads from the API server, and calls visit with each page. list is reused for each page, so
// visit must not keep it.
func EachPage[T client.ObjectList](ctx context.Context, c client.Client, list T, visit func(T), which ...client.ListOption) error {
	for token := ""; ; {
		if err := c.List(ctx, list, append(which, client.Limit(page), client.Continue(token))...); err != nil {
			return fmt.Errorf("list %T: %w", list, err)
		}
		visit(list)
		if token = list.GetContinue(); token == "" {
			return nil
		}
	}
}
